#include "profiler/recorder.h"

#include <algorithm>
#include <chrono>

#include "plan/base/check.h"

namespace shardlab::profiler {

namespace {

class SteadyReading final : public Clock {
 public:
  double now() const override { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
};

}  // namespace

CpuRecorder::CpuRecorder(int world_size, std::vector<std::string> streams, int64_t events_per_stream)
    : world_size_(world_size),
      streams_(std::move(streams)),
      capacity_(events_per_stream),
      lanes_(static_cast<size_t>(world_size) * streams_.size()) {
  for (Lane& l : lanes_) l.events.reserve(static_cast<size_t>(capacity_));
}

void CpuRecorder::record(const TraceEvent& event) {
  if (!on_) return;
  Lane& l = lane(event.rank, event.stream);
  if (static_cast<int64_t>(l.events.size()) >= capacity_) {
    ++l.dropped;
    return;
  }
  l.events.push_back(event);
}

void CpuRecorder::record_step(int32_t step, int32_t rank, double begin, double end) {
  if (!on_) return;
  if (step_numbers_.empty() || step_numbers_.back() != step) {
    step_numbers_.push_back(step);
    steps_.emplace_back(static_cast<size_t>(world_size_));
  }
  steps_.back()[static_cast<size_t>(rank)] = {begin, end};
}

Trace CpuRecorder::take() {
  Trace trace;
  trace.producer = "executor";
  trace.world_size = world_size_;
  trace.steps = static_cast<int>(steps_.size());
  trace.streams = streams_;
  for (const auto& ranks : steps_) trace.step_interval.insert(trace.step_interval.end(), ranks.begin(), ranks.end());
  const auto number = [&](int32_t step) {
    return static_cast<int32_t>(std::ranges::lower_bound(step_numbers_, step) - step_numbers_.begin());
  };
  for (int rank = 0; rank < world_size_; ++rank) {
    const auto first = static_cast<std::ptrdiff_t>(trace.events.size());
    for (size_t stream = 0; stream < streams_.size(); ++stream) {
      Lane& l = lane(rank, static_cast<int>(stream));
      for (TraceEvent event : l.events) {
        event.step = number(event.step);
        trace.events.push_back(event);
      }
      trace.dropped += l.dropped;
      l.events.clear();
      l.dropped = 0;
    }
    std::stable_sort(trace.events.begin() + first, trace.events.end(), [](const TraceEvent& a, const TraceEvent& b) {
      return a.step != b.step ? a.step < b.step : a.begin < b.begin;
    });
  }
  steps_.clear();
  step_numbers_.clear();
  trace.recorder_overhead_s = recorder_overhead(SteadyReading());
  return trace;
}

double recorder_overhead(const Clock& clock) {
  constexpr int kBatches = 9;
  constexpr int64_t kEvents = 2000;
  std::array<double, kBatches> seconds{};
  for (double& batch : seconds) {
    CpuRecorder recorder(1, {"compute"}, kEvents);
    const double begin = clock.now();
    for (int64_t i = 0; i < kEvents; ++i) {
      TraceEvent event;
      event.instruction = static_cast<int32_t>(i);
      event.begin = clock.now();
      event.end = clock.now();
      recorder.record(event);
    }
    batch = (clock.now() - begin) / static_cast<double>(kEvents);
  }
  std::ranges::sort(seconds);
  return seconds[kBatches / 2];
}

}  // namespace shardlab::profiler
