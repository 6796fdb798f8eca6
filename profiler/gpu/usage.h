// The usage of a device while a program ran: energy, power, clocks, throttling.
//
//   UsageSampler sampler(device, clock, 0.1);   // profiler/gpu/nvml.h
//   ... the steps to be measured ...
//   const DeviceUsage usage = sampler.stop();
//   measurement.energy_j = usage.energy_j / steps;   // where it has a value
#pragma once

#include <condition_variable>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "plan/interfaces.h"
#include "profiler/gpu/nvml.h"

namespace shardlab::profiler {

/// Smallest, median and largest sample.
struct Spread {
  double low = 0, median = 0, high = 0;
};

struct DeviceUsage {
  DeviceFacts facts;
  int samples = 0;
  double seconds = 0;
  /// Joules of the whole device, the idle share included: the difference of its counter. None if it has no counter, or if the
  /// counter did not move.
  std::optional<double> energy_j;
  /// How far `energy_j` may be off: the counter is refreshed every 100 ms or so, so both readings may be that old.
  std::optional<double> energy_error_j;
  std::optional<Spread> power_w, sm_clock_mhz, memory_clock_mhz, temperature_c;

  struct Throttled {
    std::string_view reason;
    double share = 0;  ///< of the samples
  };
  std::vector<Throttled> throttled;  ///< only what slows a busy device, in the order of `throttle_reasons`

  /// Warnings for a reader of the measurement: "power cap in 80 % of the samples: the clock was 1500 of 1980 MHz".
  std::vector<std::string> warnings() const;
};

/// Folds readings, which are in order of time. The first and the last bracket the run.
DeviceUsage summarise(const DeviceFacts& facts, std::span<const DeviceReading> readings);

/// Reads a device from its making to `stop`: at both ends, and in between every `period_s` on a thread of its own (none where
/// it is 0).
class UsageSampler {
 public:
  UsageSampler(const NvmlDevice& device, const Clock& clock, double period_s = 0.1);
  ~UsageSampler();
  UsageSampler(const UsageSampler&) = delete;
  UsageSampler& operator=(const UsageSampler&) = delete;

  /// Takes one more reading now.
  void sample();
  /// The last reading, and the usage since the sampler was made. Called once.
  DeviceUsage stop();

 private:
  void end_thread();

  const NvmlDevice device_;
  const Clock& clock_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool ending_ = false;
  std::vector<DeviceReading> readings_;
  std::thread thread_;
};

}  // namespace shardlab::profiler
