#include "profiler/gpu/usage.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

namespace shardlab::profiler {

namespace {

/// The counter of A100 and H100 moves every 100 ms (Yang et al., "Part-time Power Measurements", 2023, section 4).
constexpr double kEnergyRefresh = 0.1;

std::optional<Spread> spread_of(std::span<const DeviceReading> readings, std::optional<double> DeviceReading::*what) {
  std::vector<double> values;
  for (const DeviceReading& r : readings)
    if (r.*what) values.push_back(*(r.*what));
  if (values.empty()) return std::nullopt;
  std::ranges::sort(values);
  return Spread{values.front(), values[values.size() / 2], values.back()};
}

}  // namespace

DeviceUsage summarise(const DeviceFacts& facts, std::span<const DeviceReading> readings) {
  DeviceUsage usage;
  usage.facts = facts;
  usage.samples = static_cast<int>(readings.size());
  if (readings.empty()) return usage;
  const DeviceReading &first = readings.front(), &last = readings.back();
  usage.seconds = last.time - first.time;
  // A counter that stood still for longer than it takes to refresh does not count; one that went back was reset.
  if (first.energy_j && last.energy_j && *last.energy_j > *first.energy_j) {
    usage.energy_j = *last.energy_j - *first.energy_j;
    if (usage.seconds > 0) usage.energy_error_j = kEnergyRefresh * *usage.energy_j / usage.seconds;
  }
  usage.power_w = spread_of(readings, &DeviceReading::power_w);
  usage.sm_clock_mhz = spread_of(readings, &DeviceReading::sm_clock_mhz);
  usage.memory_clock_mhz = spread_of(readings, &DeviceReading::memory_clock_mhz);
  usage.temperature_c = spread_of(readings, &DeviceReading::temperature_c);

  const auto told = std::ranges::count_if(readings, [](const DeviceReading& r) { return r.throttle_bits.has_value(); });
  for (const ThrottleReason& reason : throttle_reasons()) {
    const auto seen = std::ranges::count_if(
        readings, [&](const DeviceReading& r) { return r.throttle_bits && (*r.throttle_bits & reason.bit) != 0; });
    if (reason.slows && seen > 0) usage.throttled.push_back({reason.name, static_cast<double>(seen) / static_cast<double>(told)});
  }
  return usage;
}

std::vector<std::string> DeviceUsage::warnings() const {
  std::vector<std::string> out;
  for (const Throttled& t : throttled) {
    std::string text = fmt::format("{} in {:.0f} % of {} samples", t.reason, 100 * t.share, samples);
    if (sm_clock_mhz && facts.max_sm_clock_mhz)
      text += fmt::format(": the clock was {:.0f} (median) of {:.0f} MHz", sm_clock_mhz->median, *facts.max_sm_clock_mhz);
    out.push_back(std::move(text));
  }
  if (energy_j && energy_error_j && *energy_error_j > 0.1 * *energy_j)
    out.push_back(fmt::format("the energy of {:.2f} s may be off by {:.0f} %: measure more steps", seconds,
                              100 * *energy_error_j / *energy_j));
  return out;
}

UsageSampler::UsageSampler(const NvmlDevice& device, const Clock& clock, double period_s) : device_(device), clock_(clock) {
  sample();
  if (period_s <= 0) return;
  thread_ = std::thread([this, period_s] {
    std::unique_lock lock(mutex_);
    while (!wake_.wait_for(lock, std::chrono::duration<double>(period_s), [this] { return ending_; })) {
      lock.unlock();
      sample();
      lock.lock();
    }
  });
}

UsageSampler::~UsageSampler() { end_thread(); }

void UsageSampler::sample() {
  DeviceReading reading = device_.read();
  reading.time = clock_.now();
  const std::lock_guard lock(mutex_);
  readings_.push_back(reading);
}

void UsageSampler::end_thread() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

DeviceUsage UsageSampler::stop() {
  end_thread();
  sample();
  return summarise(device_.facts(), readings_);
}

}  // namespace shardlab::profiler
