#include "runtime/thread_transport.h"

#include "runtime/stepped_communicator.h"

namespace shardlab::runtime {

Channel& Channels::at(CommId comm, int from, int to) {
  const std::lock_guard lock(mutex_);
  auto& slot = channels_[{comm.value, from, to}];
  if (!slot) slot = std::make_unique<Channel>();
  return *slot;
}

std::unique_ptr<Communicator> ThreadTransport::join(int rank, CommId comm, std::span<const int> members) {
  return join_by(kernels_, rank, members, [&](int peer) {
    return std::make_unique<MemoryWire>(peer, channels_.at(comm, rank, peer), channels_.at(comm, peer, rank));
  });
}

}  // namespace shardlab::runtime
