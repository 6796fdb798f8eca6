// Messages that the peer reads where they lie: in the memory of one process, or in memory that processes share.
#pragma once

#include <cstdint>

#include "runtime/wire.h"

namespace shardlab::runtime {

/// One direction between two ranks of one communicator. The sender posts where its buffer lies, the receiver reads from it, and the
/// sender goes on when it has been read: a rendezvous, with no bytes in between. Holds no address: processes see shared memory at
/// places of their own.
struct Channel {
  /// `shared`: it lies in memory that processes share.
  explicit Channel(bool shared = false) : posted(shared), taken(shared) {}

  Counter posted;  ///< messages offered
  Counter taken;   ///< messages read

  static constexpr int64_t kNoBuffer = -1;
  int64_t place = kNoBuffer;  ///< of the buffer on offer, from the base of the sender's memory. Written before `posted` advances
  int64_t bytes = 0;          ///< of the message on offer
  uint64_t offered = 0;       ///< the sender's own count

  alignas(64) double read_begin = 0;  ///< when the receiver began to read. Written before `taken` advances
  uint64_t read = 0;                  ///< the receiver's own count
};

/// Memory that two ranks have in common, as each side sees it. Null: addresses are the same on both sides.
struct CommonMemory {
  const std::byte* own = nullptr;   ///< where the memory of this rank's process begins
  const std::byte* peer = nullptr;  ///< where that of the peer's process begins, here
};

class MemoryWire final : public Wire {
 public:
  /// `peer` is the peer's rank, for messages. The channels outlive the wire.
  MemoryWire(int peer, Channel& to, Channel& from, const CommonMemory& memory = {})
      : peer_(peer), to_(to), from_(from), memory_(memory) {}

  bool packs() const override { return false; }
  void offer(const Message& message) override;
  Arrived await_offer(int64_t bytes, Moved& moved, Task& task) override;
  void await_bytes(int64_t, Task&) override {}
  void release() override;
  void await_taken(Moved& moved, Task& task) override;

 private:
  const int peer_;
  Channel& to_;
  Channel& from_;
  const CommonMemory memory_;
};

}  // namespace shardlab::runtime
