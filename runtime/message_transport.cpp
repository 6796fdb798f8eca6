#include "runtime/message_transport.h"

#include <algorithm>
#include <utility>

#include "plan/base/check.h"
#include "runtime/stepped_communicator.h"

namespace shardlab::runtime {

namespace {

/// Pieces of a message, as `came` counts them.
int64_t pieces_of(const MessageChannel& channel) {
  return channel.rehearsal ? 1 : std::max<int64_t>(1, (channel.bytes + kPieceBytes - 1) / kPieceBytes);
}

/// One rank's end to one rank of another process.
class MessageWire final : public Wire {
 public:
  MessageWire(MessageTransport& transport, MessageChannel& channel, CommId comm, int rank, int peer, int process)
      : transport_(transport), channel_(channel), comm_(comm), rank_(rank), peer_(peer), process_(process) {}

  bool packs() const override { return true; }

  void offer(const Message& message) override {
    ++channel_.offered;
    MessageHeader header = header_of(message.bytes);
    header.rehearsal = message.buffer == nullptr ? 1 : 0;
    transport_.post(process_, header, message.slices);
  }

  /// Of the time until a message begins to come, what went by before its first byte came is waiting for the peer.
  Arrived await_offer(int64_t bytes, Moved& moved, Task& task) override {
    const double begin = task.now();
    channel_.read_begin = begin;
    if (channel_.came.value() <= channel_.read) {
      task.wait(channel_.came, channel_.read + 1, {WaitCause::Kind::kMessage, peer_, 0});
      moved.peer_wait_s += std::clamp(channel_.began - begin, 0.0, task.now() - begin);
    }
    SHARDLAB_CHECK(channel_.bytes == bytes, "rank {} expects {} bytes of rank {}, which offers {}", rank_, bytes, peer_,
                   channel_.bytes);
    return {channel_.rehearsal ? nullptr : channel_.message.data(), true};
  }

  void await_bytes(int64_t bytes, Task& task) override {
    const int64_t pieces = std::min((bytes + kPieceBytes - 1) / kPieceBytes, pieces_of(channel_));
    const uint64_t target = channel_.read + static_cast<uint64_t>(pieces);
    if (channel_.came.value() < target) task.wait(channel_.came, target, {WaitCause::Kind::kMessage, peer_, 0});
  }

  void release() override {
    channel_.read += static_cast<uint64_t>(pieces_of(channel_));
    SHARDLAB_CHECK(channel_.came.value() == channel_.read, "rank {} releases a message of rank {} that is still coming", rank_,
                   peer_);
    MessageHeader header = header_of(0);
    header.is_answer = 1;
    header.lay_s = std::max(0.0, channel_.read_begin - channel_.complete);
    transport_.post(process_, header, {});
  }

  void await_taken(Moved& moved, Task& task) override {
    if (channel_.answered.value() >= channel_.offered) return;
    const double begin = task.now();
    task.wait(channel_.answered, channel_.offered, {WaitCause::Kind::kTaken, peer_, 0});
    moved.peer_wait_s += std::min(channel_.lay_s, task.now() - begin);
  }

 private:
  MessageHeader header_of(int64_t bytes) const {
    MessageHeader header;
    header.comm = comm_.value;
    header.from = rank_;
    header.to = peer_;
    header.bytes = bytes;
    return header;
  }

  MessageTransport& transport_;
  MessageChannel& channel_;
  const CommId comm_;
  const int rank_, peer_, process_;
};

}  // namespace

MessageTransport::MessageTransport(const kernels::Kernels& kernels, const PlacedPlan& placed, Control& control)
    : kernels_(kernels), control_(control), ranks_here_(placed.plan->mesh.world_size() / control.processes()) {
  const Mesh& mesh = placed.plan->mesh;
  const int first = control.process() * ranks_here_;
  // Every channel is there before the first message comes.
  for (size_t c = 0; c < placed.plan->comms.size(); ++c)
    for (int rank = first; rank < first + ranks_here_; ++rank)
      for (const int peer : group_of(mesh, placed.plan->comms[c], rank))
        if (peer / ranks_here_ != control.process())
          channels_[{static_cast<int32_t>(c), rank, peer}] = std::make_unique<MessageChannel>();
}

MessageChannel& MessageTransport::channel(const Key& key) {
  const auto found = channels_.find(key);
  SHARDLAB_CHECK(found != channels_.end(), "ranks {} and {} have no messages on communicator {}", std::get<1>(key),
                 std::get<2>(key), std::get<0>(key));
  return *found->second;
}

std::unique_ptr<Communicator> MessageTransport::join(int rank, CommId comm, std::span<const int> members) {
  return join_by(kernels_, rank, members, [&](int peer) -> std::unique_ptr<Wire> {
    const int process = peer / ranks_here_;
    if (process == control_.process())
      return std::make_unique<MemoryWire>(peer, inside_.at(comm, rank, peer), inside_.at(comm, peer, rank));
    return std::make_unique<MessageWire>(*this, channel({comm.value, rank, peer}), comm, rank, peer, process);
  });
}

MessageChannel& MessageTransport::begin(const MessageHeader& header) {
  SHARDLAB_CHECK(header.magic == MessageHeader().magic, "what came from another process is no message: {:#x}", header.magic);
  MessageChannel& into = channel({header.comm, header.to, header.from});
  if (header.is_answer != 0) return into;
  into.began = SteadyClock().now();
  into.bytes = header.bytes;
  into.rehearsal = header.rehearsal != 0;
  if (!into.rehearsal) into.message.resize(static_cast<size_t>(header.bytes));
  return into;
}

void MessageTransport::complete(const MessageHeader& header, MessageChannel& channel) {
  if (header.is_answer != 0) {
    channel.lay_s = header.lay_s;
    channel.answered.advance();
  } else {
    channel.complete = SteadyClock().now();
    channel.came.advance(static_cast<uint64_t>(pieces_of(channel) - std::exchange(channel.here, 0)));
  }
}

void MessageTransport::arrived(MessageChannel& channel, int64_t bytes) {
  const int64_t pieces = bytes / kPieceBytes;
  if (pieces > channel.here) channel.came.advance(static_cast<uint64_t>(pieces - std::exchange(channel.here, pieces)));
}

}  // namespace shardlab::runtime
