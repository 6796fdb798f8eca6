// A step's allocations through the caching allocator: how much of the device it holds at the worst, and how much of that is live.
#pragma once

#include <cstdint>
#include <span>

#include "simulator/estimator/analytic/analytic.h"
#include "simulator/estimator/memory/caching_allocator.h"

namespace shardlab::simulator::whatif {

struct Replayed {
  int64_t live = 0;      ///< the most that was handed out, rounded as the allocator does
  int64_t reserved = 0;  ///< the most that was taken from the driver
  bool retried = false;  ///< cached segments were given back on the way
  bool out_of_memory = false;
};

/// The events of `allocation_events`, in order. `capacity`: device bytes that the allocator may take, 0 for no end.
Replayed replay(std::span<const analytic::AllocationEvent> events, const AllocatorOptions& options);

/// Device bytes that the allocator of a stage may take: what the context and the communicators leave of `capacity`. 0: no end, also
/// where that does not hold what is live, so that the replay says what the allocator would take if it could.
int64_t room_for_allocator(const analytic::MemoryBytes& stage, int64_t capacity);
/// Bytes held beyond what is live, of the stage whose allocations were replayed in `room`.
int64_t fragmented_bytes(const Replayed& replayed, const analytic::MemoryBytes& stage, int64_t room);

/// Bytes that the allocator holds beyond what is live at the peak, for one stage of a legal point: 0 where the profile has an
/// arena. The allocator may take what the context and the communicators leave of `capacity` (0: no end); before it fails it gives
/// back what it only caches, so that a layout whose bytes at ease exceed the capacity may run all the same.
int64_t fragmented_bytes(const analytic::Prepared& prepared, const analytic::Point& point, int32_t stage, int64_t capacity);

}  // namespace shardlab::simulator::whatif
