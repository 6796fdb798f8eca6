#include "simulator/estimator/memory/replay.h"

#include <algorithm>
#include <vector>

namespace shardlab::simulator::whatif {

using analytic::AllocationEvent;
using analytic::MemoryBytes;
using analytic::MemoryPart;

Replayed replay(std::span<const AllocationEvent> events, const AllocatorOptions& options) {
  CachingAllocator allocator(options);
  std::vector<int32_t> blocks;
  for (const AllocationEvent& e : events) {
    const auto tensor = static_cast<size_t>(e.tensor);
    if (blocks.size() <= tensor) blocks.resize(std::max(tensor + 1, 2 * blocks.size()), -1);
    if (e.bytes > 0)
      blocks[tensor] = allocator.allocate(e.bytes, e.stream);
    else
      allocator.release(blocks[tensor]);
  }
  return {.live = allocator.peak_allocated(),
          .reserved = allocator.peak_reserved(),
          .retried = allocator.retries() > 0,
          .out_of_memory = allocator.out_of_memory()};
}

int64_t room_for_allocator(const MemoryBytes& stage, int64_t capacity) {
  const int64_t beside = stage[MemoryPart::kContext] + stage[MemoryPart::kNccl];
  return capacity - beside > stage.live() ? capacity - beside : 0;
}

int64_t fragmented_bytes(const Replayed& r, const MemoryBytes& stage, int64_t room) {
  const int64_t held = std::max<int64_t>(0, r.reserved - r.live);
  // Where the replay found room by giving cached segments back, so does the run, whatever lies between its live bytes
  // and the estimate's.
  return room > 0 && !r.out_of_memory ? std::min(held, room - stage.live()) : held;
}

int64_t fragmented_bytes(const analytic::Prepared& prepared, const analytic::Point& point, int32_t stage, int64_t capacity) {
  if (!prepared.profile().memory.caching) return 0;
  const std::vector<AllocationEvent> events = allocation_events(prepared, point, stage);
  if (events.empty()) return 0;
  const MemoryBytes memory = analytic::Estimator(prepared).stage_memory(point, stage);
  const int64_t room = room_for_allocator(memory, capacity);
  const Replayed r = replay(events, {.expandable_segments = prepared.profile().memory.expandable, .capacity = room});
  return fragmented_bytes(r, memory, room);
}

}  // namespace shardlab::simulator::whatif
