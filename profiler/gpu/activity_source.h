// The source of activity records: CUPTI, or a test.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "profiler/gpu/activity.h"
#include "profiler/gpu/library.h"

namespace shardlab::profiler {

class ActivitySource {
 public:
  virtual ~ActivitySource() = default;
  /// Records kernels, copies, fills, synchronisations, overheads and host calls while on. Off at first. Throws WorldError.
  virtual void set_on(bool on) = 0;
  /// Host calls of this thread from here to `pop` get this external id.
  virtual void push(uint64_t id) = 0;
  virtual void pop() = 0;
  /// The clock of the records.
  virtual int64_t now_ns() = 0;
  /// Everything recorded since the last call; the device must be idle. Allocations are recorded from the beginning on, whether on
  /// or off. Throws WorldError.
  virtual ActivityLog drain() = 0;
};

/// A source with its state; none where the state is not ok.
struct OpenedSource {
  std::unique_ptr<ActivitySource> source;
  LibraryStatus status;
};

/// CUPTI on the driver of this machine. At most `max_records` are kept between two drains.
OpenedSource open_cupti(int64_t max_records);

}  // namespace shardlab::profiler
