// Records what the executor's threads did, without locks and without growing while they run.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "plan/interfaces.h"
#include "plan/trace.h"

namespace shardlab::profiler {

/// Keeps the events of each (rank, stream) in a vector of its own, reserved beforehand. An event that no longer fits is dropped
/// and counted. One thread records for one (rank, stream) at a time; `take` is called between steps.
class CpuRecorder final : public Recorder {
 public:
  /// `events_per_stream`: room on each stream of each rank, for all steps to be recorded.
  CpuRecorder(int world_size, std::vector<std::string> streams, int64_t events_per_stream);

  void record(const TraceEvent& event) override;
  void record_step(int32_t step, int32_t rank, double begin, double end) override;

  /// Nothing is kept while off: warm-up steps. On at first.
  void set_on(bool on) { on_ = on; }

  /// The recorded trace, events grouped by rank in order of begin, with the measured cost of recording one; empties the recorder.
  /// Steps are numbered from the first one kept.
  Trace take();

 private:
  struct alignas(64) Lane {
    std::vector<TraceEvent> events;
    int64_t dropped = 0;
  };
  Lane& lane(int rank, int stream) { return lanes_[static_cast<size_t>(rank) * streams_.size() + static_cast<size_t>(stream)]; }

  const int world_size_;
  const std::vector<std::string> streams_;
  const int64_t capacity_;
  bool on_ = true;
  std::vector<Lane> lanes_;
  std::vector<std::vector<std::array<double, 2>>> steps_;  ///< by step kept, by rank
  std::vector<int32_t> step_numbers_;                      ///< of the executor, by step kept
};

/// Seconds it takes to record one event, the two readings of `clock` included: the median of several batches, measured now.
double recorder_overhead(const Clock& clock);

}  // namespace shardlab::profiler
