#include "profiler/gpu/nvml.h"

#include <fmt/format.h>

#include <array>

namespace shardlab::profiler {

namespace {

// nvmlReturn_t
constexpr int kNoPermission = 4, kDriverNotLoaded = 9, kLibraryMismatch = 18;
// nvmlClockType_t, nvmlTemperatureSensors_t
constexpr int kClockSm = 1, kClockMemory = 2, kSensorGpu = 0;

std::string words(const NvmlCalls& calls, int code) {
  const char* text = calls.error_string != nullptr ? calls.error_string(code) : nullptr;
  return fmt::format("{} ({})", text != nullptr ? text : "?", code);
}

LibraryStatus init_status(const NvmlCalls& calls, int code) {
  const std::string message = fmt::format("nvmlInit says {}", words(calls, code));
  switch (code) {
    case 0: return {LibraryState::kOk, "", ""};
    case kDriverNotLoaded:
      return {LibraryState::kNoDriver, message, "load NVIDIA's driver, and start containers with the devices (--gpus all)"};
    case kNoPermission:
      return {LibraryState::kNoPrivilege, message, "give this user access to /dev/nvidia*; energy_j stays empty without"};
    case kLibraryMismatch: return {LibraryState::kFailed, message, "the driver was updated under a running kernel module: reboot"};
    default: return {LibraryState::kFailed, message, "see that nvidia-smi works; energy_j stays empty without"};
  }
}

template <class Call, class... Arguments>
std::optional<double> scaled(double scale, Call* call, NvmlCalls::Device device, Arguments... arguments) {
  unsigned value = 0;
  if (call == nullptr || call(device, arguments..., &value) != 0) return std::nullopt;
  return scale * value;
}

}  // namespace

const std::vector<ThrottleReason>& throttle_reasons() {
  static const std::vector<ThrottleReason> reasons{
      {0x001, "idle", false},
      {0x002, "clocks set by the user", false},
      {0x004, "power cap", true},
      {0x008, "hardware slowdown", true},
      {0x010, "sync boost", true},
      {0x020, "thermal slowdown by software", true},
      {0x040, "thermal slowdown by hardware", true},
      {0x080, "power brake", true},
      {0x100, "clocks of the display", false},
  };
  return reasons;
}

DeviceFacts NvmlDevice::facts() const {
  DeviceFacts facts;
  std::array<char, 96> name{};  // NVML_DEVICE_NAME_V2_BUFFER_SIZE
  if (calls_.name != nullptr && calls_.name(device_, name.data(), static_cast<unsigned>(name.size())) == 0)
    facts.name = name.data();
  facts.max_sm_clock_mhz = scaled(1, calls_.max_clock, device_, kClockSm);
  facts.power_limit_w = scaled(1e-3, calls_.power_limit, device_);
  return facts;
}

DeviceReading NvmlDevice::read() const {
  DeviceReading r;
  unsigned long long wide = 0;
  if (calls_.total_energy != nullptr && calls_.total_energy(device_, &wide) == 0) r.energy_j = 1e-3 * static_cast<double>(wide);
  if (calls_.throttle_reasons != nullptr && calls_.throttle_reasons(device_, &wide) == 0) r.throttle_bits = wide;
  r.sm_clock_mhz = scaled(1, calls_.clock, device_, kClockSm);
  r.memory_clock_mhz = scaled(1, calls_.clock, device_, kClockMemory);
  r.power_w = scaled(1e-3, calls_.power, device_);
  r.temperature_c = scaled(1, calls_.temperature, device_, kSensorGpu);
  return r;
}

std::optional<int64_t> NvmlDevice::used_bytes() const {
  NvmlCalls::Memory memory;
  if (calls_.memory == nullptr || calls_.memory(device_, &memory) != 0) return std::nullopt;
  return static_cast<int64_t>(memory.used);
}

std::unique_ptr<Nvml> Nvml::open_on(const NvmlCalls& calls, LibraryStatus& status) {
  if (calls.init == nullptr || calls.shutdown == nullptr || calls.device_by_index == nullptr ||
      calls.device_by_pci_bus_id == nullptr) {
    status = {LibraryState::kAbsent, "libnvidia-ml.so.1 lacks calls that this build makes", "update NVIDIA's driver"};
    return nullptr;
  }
  status = init_status(calls, calls.init());
  if (!status.ok()) return nullptr;
  unsigned devices = 0;
  if (calls.device_count != nullptr && calls.device_count(&devices) == 0)
    status.message = fmt::format("{} device{}", devices, devices == 1 ? "" : "s");
  return std::unique_ptr<Nvml>(new Nvml(calls));
}

std::unique_ptr<Nvml> Nvml::open(LibraryStatus& status) {
  SharedLibrary library(std::array{"libnvidia-ml.so.1"});
  if (!library.is_open()) {
    status = {LibraryState::kAbsent, "there is no NVML here (libnvidia-ml.so.1)",
              "it comes with NVIDIA's driver; energy_j, clocks and throttling stay empty without"};
    return nullptr;
  }
  NvmlCalls calls;
  library.find("nvmlInit_v2", calls.init);
  library.find("nvmlShutdown", calls.shutdown);
  library.find("nvmlErrorString", calls.error_string);
  library.find("nvmlDeviceGetCount_v2", calls.device_count);
  library.find("nvmlDeviceGetHandleByIndex_v2", calls.device_by_index);
  library.find("nvmlDeviceGetHandleByPciBusId_v2", calls.device_by_pci_bus_id);
  library.find("nvmlDeviceGetName", calls.name);
  library.find("nvmlDeviceGetTotalEnergyConsumption", calls.total_energy);
  library.find("nvmlDeviceGetClockInfo", calls.clock);
  library.find("nvmlDeviceGetMaxClockInfo", calls.max_clock);
  if (!library.find("nvmlDeviceGetCurrentClocksEventReasons", calls.throttle_reasons))
    library.find("nvmlDeviceGetCurrentClocksThrottleReasons", calls.throttle_reasons);  // its name before driver 535
  library.find("nvmlDeviceGetPowerUsage", calls.power);
  library.find("nvmlDeviceGetEnforcedPowerLimit", calls.power_limit);
  library.find("nvmlDeviceGetTemperature", calls.temperature);
  library.find("nvmlDeviceGetMemoryInfo", calls.memory);
  library.keep();
  return open_on(calls, status);
}

Nvml::~Nvml() { calls_.shutdown(); }

Result<NvmlDevice> Nvml::device(const std::string& pci_bus_id) const {
  NvmlCalls::Device device = nullptr;
  if (const int code = calls_.device_by_pci_bus_id(pci_bus_id.c_str(), &device); code != 0)
    return Error{ExitCode::kEnvironment, fmt::format("NVML has no device at {}: {}", pci_bus_id, words(calls_, code)),
                 "compare with `nvidia-smi --query-gpu=pci.bus_id --format=csv`", ""};
  return NvmlDevice(calls_, device);
}

Result<NvmlDevice> Nvml::device(unsigned index) const {
  NvmlCalls::Device device = nullptr;
  if (const int code = calls_.device_by_index(index, &device); code != 0)
    return Error{ExitCode::kEnvironment, fmt::format("NVML has no device {}: {}", index, words(calls_, code)),
                 "compare with `nvidia-smi -L`", ""};
  return NvmlDevice(calls_, device);
}

LibraryStatus nvml_status() {
  LibraryStatus status;
  Nvml::open(status);
  return status;
}

}  // namespace shardlab::profiler
