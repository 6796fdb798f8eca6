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

/// Device bytes that the allocator of a stage may take: `capacity` less the context and the communicators. 0: no limit. Also 0 if
/// that room does not hold the live bytes, so that the replay says what the allocator would take if it could.
int64_t room_for_allocator(const analytic::MemoryBytes& stage, int64_t capacity);
/// Bytes reserved beyond the live ones, of the stage whose allocations were replayed in `room`.
int64_t fragmented_bytes(const Replayed& replayed, const analytic::MemoryBytes& stage, int64_t room);

/// Bytes reserved beyond the live ones at the peak, for one stage of a legal point; 0 if the profile has an arena. The allocator
/// may take `capacity` less the context and the communicators (0: no limit). Before it fails it gives back its cached blocks, so a
/// layout whose reserved bytes at ease exceed the capacity may run all the same.
int64_t fragmented_bytes(const analytic::Prepared& prepared, const analytic::Point& point, int32_t stage, int64_t capacity);

}  // namespace shardlab::simulator::whatif
