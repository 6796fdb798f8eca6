// What carries messages between two ranks: the small class that each transport of the CPU is.
//
// Order of calls, and the sums made of what arrives, belong to the communicator (runtime/stepped_communicator.h): so results and
// counted bytes are the same on every wire by construction.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "runtime/transport.h"

namespace shardlab::runtime {

/// A run of bytes of a message.
struct Slice {
  const std::byte* at = nullptr;
  int64_t bytes = 0;
};

/// What one rank offers another: the buffer it lies in, and which bytes of that buffer. A null buffer is a rehearsal.
struct Message {
  const void* buffer = nullptr;
  int64_t bytes = 0;              ///< of all slices
  std::span<const Slice> slices;  ///< in order; none where the wire does not pack
};

/// Bytes that are read, or reduced, at a time while a long message is still coming.
inline constexpr int64_t kPieceBytes = 256 << 10;

/// A message that has come, or has begun to.
struct Arrived {
  const std::byte* at = nullptr;  ///< the sender's buffer as this process sees it or, packed, the slices one after the other
  bool packed = false;
};

/// One rank's end of the messages between it and one peer on one communicator. At most one message is under way each way. Called
/// by one thread at a time.
class Wire {
 public:
  virtual ~Wire() = default;
  /// Does a message travel as its slices? Otherwise the peer reads them where they lie, and needs none.
  virtual bool packs() const = 0;
  /// Offers a message, whose bytes stay as they are until `await_taken` has returned. Does not wait.
  virtual void offer(const Message& message) = 0;
  /// The peer's message once it has begun to come, which must be of `bytes`. Stays readable until `release`.
  virtual Arrived await_offer(int64_t bytes, Moved& moved, Task& task) = 0;
  /// Returns once the first `bytes` bytes of that message are here. Those of a message that does not travel always are.
  virtual void await_bytes(int64_t bytes, Task& task) = 0;
  /// The message has been read: all of its bytes were awaited.
  virtual void release() = 0;
  /// Returns once the peer has released what was offered.
  virtual void await_taken(Moved& moved, Task& task) = 0;
};

}  // namespace shardlab::runtime
