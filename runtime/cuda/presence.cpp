#include <fmt/format.h>

#include "runtime/cuda/api.h"

namespace shardlab::runtime::cuda {

std::string version_text(int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); }

Presence presence(Api& api) {
  Presence p;
  p.built = true;
  if (api.runtime_version(&p.runtime) != kSuccess) p.runtime = 0;
  const Status driver = api.driver_version(&p.driver);
  if (driver != kSuccess || p.driver == 0) {
    p.driver = 0;
    p.reason = "this machine has no NVIDIA driver";
    p.remedy = "run on a machine with an NVIDIA GPU and its driver, or use --backend cpu";
    return p;
  }
  int devices = 0;
  const Status counted = api.device_count(&devices);
  p.devices = counted == kSuccess ? devices : 0;
  if (counted == kInsufficientDriver) {
    p.reason =
        fmt::format("the NVIDIA driver is for CUDA {} and this program needs {}", version_text(p.driver), version_text(p.runtime));
    p.remedy = "install a newer driver, or build with the older toolkit";
  } else if (counted != kSuccess && counted != kNoDevice) {
    p.reason = fmt::format("CUDA does not start: {}", api.describe(counted));
    p.remedy = "see what nvidia-smi says; a reset of the device or of the driver may be needed";
  } else if (p.devices == 0) {
    p.reason = "the NVIDIA driver shows no device";
    p.remedy = "see what nvidia-smi says, and that CUDA_VISIBLE_DEVICES and the container's options show this process a device";
  }
  return p;
}

Presence presence() {
  auto api = real_api();
  if (api.ok()) return presence(**api);
  Presence p;
  p.reason = api.error().message;
  p.remedy = api.error().hint;
  return p;
}

}  // namespace shardlab::runtime::cuda
