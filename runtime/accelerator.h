// The device interface of a rank whose back end only enqueues work.
#pragma once

#include <cstddef>
#include <cstdint>

#include "plan/buffer.h"

namespace shardlab::runtime {

/// The rank's threads issue work to the device's streams, which run it later: in order within a stream, and between streams ordered
/// by events. Stream numbers are the plan's. Every call but `reserve` and `prepare` is safe from several threads, as long as one
/// stream is used by one thread at a time. Each may throw WorldError, also for work issued earlier.
class Accelerator {
 public:
  virtual ~Accelerator() = default;

  /// The resources that a rank needs, told once before the first step.
  struct Needs {
    int streams = 1;
    int events = 0;
    int marks = 0;  ///< timed events; 0: no op is timed
  };
  virtual void prepare(const Needs& needs) = 0;
  /// Makes the calling thread one that may issue work.
  virtual void attach_thread() = 0;

  /// Storage of a space, which lives as long as the device. Host memory is such that copies from and to it need no staging.
  virtual std::byte* reserve(Space space, int64_t bytes) = 0;
  /// Sets each of `bytes` bytes to `value`, in the stream's order.
  virtual void fill(void* at, uint8_t value, int64_t bytes, int stream) = 0;
  /// Copies between any two spaces, or from and to memory of this process, in the stream's order.
  virtual void copy(void* to, const void* from, int64_t bytes, int stream) = 0;

  /// An event of the stream program: the stream's place when it was last recorded. `wait` is issued after its `record`.
  virtual void record(int event, int stream) = 0;
  virtual void wait(int event, int stream) = 0;
  /// Whether the device has come to the place where `event` was last recorded.
  virtual bool reached(int event) = 0;
  /// Whether everything issued to the stream has run.
  virtual bool idle(int stream) = 0;
  /// Returns once everything issued to every stream has run. Between steps only: nothing ends it early.
  virtual void synchronise() = 0;

  /// A timed event, and the milliseconds that the device took from one to another; both must have been reached.
  virtual void mark(int mark, int stream) = 0;
  virtual double milliseconds(int from, int to) = 0;
};

}  // namespace shardlab::runtime
