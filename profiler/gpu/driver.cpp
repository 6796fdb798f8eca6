#include "profiler/gpu/driver.h"

#include <fmt/format.h>

#include <array>

namespace shardlab::profiler {

DriverCalls load_driver() {
  SharedLibrary library(std::array{"libcuda.so.1"});
  DriverCalls calls;
  library.find("cuInit", calls.init);
  library.find("cuDriverGetVersion", calls.version);
  library.find("cuDeviceGetCount", calls.device_count);
  library.keep();
  return calls;
}

LibraryStatus driver_status(const DriverCalls& driver) {
  constexpr const char* kInstall = "install NVIDIA's driver, and start containers with the devices (--gpus all)";
  const auto none = [&](std::string message) { return LibraryStatus{LibraryState::kNoDriver, std::move(message), kInstall}; };
  if (driver.init == nullptr || driver.version == nullptr || driver.device_count == nullptr)
    return none("there is no NVIDIA driver here (libcuda.so.1)");
  constexpr int kNoDevice = 100;
  if (const int code = driver.init(0); code != 0)
    return none(code == kNoDevice ? "the NVIDIA driver knows no device"
                                  : fmt::format("the NVIDIA driver cannot be used: cuInit says {}", code));
  int version = 0, devices = 0;
  if (driver.version(&version) != 0 || version <= 0) return none("the NVIDIA driver does not tell its version");
  if (driver.device_count(&devices) != 0 || devices <= 0) return none("the NVIDIA driver knows no device");
  return {LibraryState::kOk,
          fmt::format("driver for CUDA {}.{}, {} device{}", version / 1000, version % 1000 / 10, devices, devices == 1 ? "" : "s"),
          ""};
}

}  // namespace shardlab::profiler
