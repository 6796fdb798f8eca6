// Ranks as threads of one process: peers read straight from each other's buffers.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "kernels/kernels.h"
#include "runtime/transport.h"

namespace shardlab::runtime {

/// One direction between two ranks of one communicator. The sender posts a pointer, the receiver reads from it, and the sender
/// goes on when it has been read: a rendezvous, with no bytes in between.
struct Channel {
  Counter posted;  ///< messages offered
  Counter taken;   ///< messages read

  const void* data = nullptr;  ///< of the message on offer: the buffer it lies in. Written before `posted` advances
  int64_t bytes = 0;           ///< of the message on offer
  uint64_t offered = 0;        ///< the sender's own count

  alignas(64) double read_begin = 0;  ///< when the receiver began to read. Written before `taken` advances
  uint64_t read = 0;                  ///< the receiver's own count
};

/// Executes plan/collective_steps.h step by step. One instance joins all ranks of one session; it has no other state than the
/// channels, one for each (communicator, sender, receiver). Needs no scratch, but for an all_to_all by halving-doubling.
///
/// Sums: `ring` and `halving-doubling` add what arrives to the own part, `direct` takes the canonical tree in group order. fp32,
/// fp64, i32 and i64 are reduced; every whole-byte type is moved.
class ThreadTransport final : public Transport {
 public:
  explicit ThreadTransport(const kernels::Kernels& kernels) : kernels_(kernels) {}
  std::unique_ptr<Communicator> join(int rank, CommId comm, std::span<const int> members) override;

 private:
  Channel& channel(CommId comm, int from, int to);

  const kernels::Kernels& kernels_;
  std::mutex mutex_;
  std::map<std::tuple<int32_t, int, int>, std::unique_ptr<Channel>> channels_;
};

}  // namespace shardlab::runtime
