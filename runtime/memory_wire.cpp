#include "runtime/memory_wire.h"

#include <algorithm>

#include "plan/base/check.h"

namespace shardlab::runtime {

void MemoryWire::offer(const Message& message) {
  const auto* buffer = static_cast<const std::byte*>(message.buffer);
  to_.place = buffer == nullptr ? Channel::kNoBuffer : reinterpret_cast<intptr_t>(buffer) - reinterpret_cast<intptr_t>(memory_.own);
  to_.bytes = message.bytes;
  ++to_.offered;
  to_.posted.advance();
}

Arrived MemoryWire::await_offer(int64_t bytes, Moved& moved, Task& task) {
  const double begin = task.now();
  double arrived = begin;
  if (from_.posted.value() <= from_.read) {
    task.wait(from_.posted, from_.read + 1, {WaitCause::Kind::kMessage, peer_, 0});
    arrived = task.now();
    moved.peer_wait_s += arrived - begin;
  }
  SHARDLAB_CHECK(from_.bytes == bytes, "rank {} expects {} bytes of rank {}, which offers {}", task.rank(), bytes, peer_,
                 from_.bytes);
  from_.read_begin = arrived;
  if (from_.place == Channel::kNoBuffer) return {};
  return {reinterpret_cast<const std::byte*>(reinterpret_cast<intptr_t>(memory_.peer) + from_.place), false};
}

void MemoryWire::release() {
  ++from_.read;
  from_.taken.advance();
}

/// Of the time until the peer has read, what went by before it began is waiting for a peer; the rest is the moving itself.
void MemoryWire::await_taken(Moved& moved, Task& task) {
  if (to_.taken.value() >= to_.offered) return;
  const double begin = task.now();
  task.wait(to_.taken, to_.offered, {WaitCause::Kind::kTaken, peer_, 0});
  const double end = task.now();
  moved.peer_wait_s += std::clamp(to_.read_begin - begin, 0.0, end - begin);
}

}  // namespace shardlab::runtime
