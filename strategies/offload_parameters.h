#pragma once

#include "plan/techniques.h"
#include "strategies/draft.h"

namespace shardlab::strategies {

/// How the slices of a stage's parameters come to the device from where they wait.
class ParkedParameters {
 public:
  ParkedParameters(Draft& draft, StageDraft& stage);

  /// Gives a slice its place outside the device.
  void park(BufferId slice);
  /// Events that read a slice from NVMe into host memory. The buffer there lives until the event of `staged_event`. Empty if the
  /// slice is not on NVMe.
  std::vector<Event> read(BufferId slice);
  /// Copies a slice to `to` on the device, from host memory.
  Event fetch(BufferId slice, BufferId to);
  /// Gives up what `read` took. Nothing elsewhere.
  std::vector<Event> give_up(BufferId slice);
  /// A buffer on the device for a slice that is then gathered.
  BufferId on_device(BufferId slice);

 private:
  BufferId staged(BufferId slice) const { return staged_.at(slice.value); }
  StreamId stream(std::string_view name) const;

  Draft& draft_;
  StageDraft& stage_;
  const bool nvme_;
  std::map<int32_t, BufferId> staged_;  ///< buffers in host memory for slices on NVMe, by slice
};

}  // namespace shardlab::strategies
