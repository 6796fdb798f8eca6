// NVIDIA's management library, loaded at run time: energy, clocks, throttling, power. Its calls are declared here, so that no build
// needs its header. Source: the NVML API reference (docs.nvidia.com/deploy/nvml-api).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "plan/base/result.h"
#include "profiler/gpu/library.h"

namespace shardlab::profiler {

/// The calls made, as a table: of the library, or a test's own. A return code of 0 is success; a device is a handle of the library.
struct NvmlCalls {
  using Device = void*;
  int (*init)() = nullptr;
  int (*shutdown)() = nullptr;
  const char* (*error_string)(int) = nullptr;
  int (*device_count)(unsigned*) = nullptr;
  int (*device_by_index)(unsigned, Device*) = nullptr;
  int (*device_by_pci_bus_id)(const char*, Device*) = nullptr;
  // Any of these may be missing, or a device may not support it: the reading then lacks the value.
  int (*name)(Device, char*, unsigned bytes) = nullptr;
  int (*total_energy)(Device, unsigned long long* millijoules) = nullptr;  ///< since the driver was loaded
  int (*clock)(Device, int type, unsigned* mhz) = nullptr;                 ///< type 1: SM, 2: memory
  int (*max_clock)(Device, int type, unsigned* mhz) = nullptr;
  int (*throttle_reasons)(Device, unsigned long long* bits) = nullptr;
  int (*power)(Device, unsigned* milliwatts) = nullptr;
  int (*power_limit)(Device, unsigned* milliwatts) = nullptr;
  int (*temperature)(Device, int sensor, unsigned* celsius) = nullptr;  ///< sensor 0: the GPU
  struct Memory {
    unsigned long long total = 0, free = 0, used = 0;  ///< bytes; used: by every process and the driver
  };
  int (*memory)(Device, Memory*) = nullptr;
};

/// Why a device's clocks are below their maximum, one bit each (nvmlClocksEventReasons).
struct ThrottleReason {
  uint64_t bit;
  std::string_view name;
  bool slows;  ///< holds a busy device back; else (idle, set by the user) it is as it should be
};
const std::vector<ThrottleReason>& throttle_reasons();

/// The readings of a device at one moment; a value that the device does not tell is missing.
struct DeviceReading {
  double time = 0;  ///< seconds on the sampler's clock
  std::optional<double> energy_j;
  std::optional<double> sm_clock_mhz, memory_clock_mhz;
  std::optional<uint64_t> throttle_bits;
  std::optional<double> power_w;
  std::optional<double> temperature_c;
};

/// The facts about a device that do not change while a program runs.
struct DeviceFacts {
  std::string name;
  std::optional<double> max_sm_clock_mhz, power_limit_w;
};

/// One device of the library, which must outlive it.
class NvmlDevice {
 public:
  NvmlDevice(const NvmlCalls& calls, NvmlCalls::Device device) : calls_(calls), device_(device) {}
  DeviceFacts facts() const;
  /// `time` is left to the caller.
  DeviceReading read() const;
  /// Bytes in use, by every process and the driver. Needs no context on the device, and makes none.
  std::optional<int64_t> used_bytes() const;

 private:
  const NvmlCalls& calls_;
  NvmlCalls::Device device_;
};

/// The library, initialised; shut down with the object.
class Nvml {
 public:
  /// None where `status` is not ok.
  static std::unique_ptr<Nvml> open(LibraryStatus& status);
  static std::unique_ptr<Nvml> open_on(const NvmlCalls& calls, LibraryStatus& status);
  ~Nvml();
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;

  /// The device of a CUDA device, by its PCI bus id ("0000:17:00.0", cudaDeviceGetPCIBusId): CUDA and NVML
  /// number devices differently.
  Result<NvmlDevice> device(const std::string& pci_bus_id) const;
  /// The device of NVML's own number.
  Result<NvmlDevice> device(unsigned index) const;

 private:
  explicit Nvml(const NvmlCalls& calls) : calls_(calls) {}
  NvmlCalls calls_;
};

/// Whether NVML can be used here. For `doctor`.
LibraryStatus nvml_status();

}  // namespace shardlab::profiler
