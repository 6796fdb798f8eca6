// Ranks as threads of one process: peers read straight from each other's buffers.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "kernels/kernels.h"
#include "runtime/memory_wire.h"
#include "runtime/transport.h"

namespace shardlab::runtime {

/// One channel for each (communicator, sender, receiver), made when first asked for. Safe from several threads.
class Channels {
 public:
  Channel& at(CommId comm, int from, int to);

 private:
  std::mutex mutex_;
  std::map<std::tuple<int32_t, int, int>, std::unique_ptr<Channel>> channels_;
};

/// One instance joins all ranks of one session; it has no other state than the channels.
class ThreadTransport final : public Transport {
 public:
  explicit ThreadTransport(const kernels::Kernels& kernels) : kernels_(kernels) {}
  std::unique_ptr<Communicator> join(int rank, CommId comm, std::span<const int> members) override;

 private:
  const kernels::Kernels& kernels_;
  Channels channels_;
};

}  // namespace shardlab::runtime
