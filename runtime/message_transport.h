// Ranks in several processes that send one another messages: what tcp, gloo and mpi have in common.
//
// A message is offered to whatever carries it, with a header that says from whom and to whom it is, and the receiver's `release` is
// answered to the sender: a rendezvous as on every wire. What comes is kept until its receiver asks for it, at most one message for
// each (communicator, sender, receiver): memory beside the plan.
#pragma once

#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "kernels/kernels.h"
#include "runtime/control.h"
#include "runtime/session.h"
#include "runtime/thread_transport.h"

namespace shardlab::runtime {

/// The two ends, in this process, of the messages between one of its ranks and one of another process on one communicator.
struct MessageChannel {
  Counter answered;                ///< messages of this rank that the peer has released
  Counter came;                    ///< pieces of `kPieceBytes` of the peer's messages that are here; a message without bytes is one
  uint64_t offered = 0;            ///< messages of this rank
  uint64_t read = 0;               ///< pieces of the messages that this rank has released
  int64_t here = 0;                ///< pieces of the message under way that `came` counts
  std::vector<std::byte> message;  ///< the last that came. Each piece is written before `came` counts it
  bool rehearsal = false;          ///< it has a length and no bytes
  int64_t bytes = 0;
  double began = 0;       ///< when its first byte came
  double complete = 0;    ///< when its last did
  double lay_s = 0;       ///< how long the peer left the last answered message lie before it asked for it
  double read_begin = 0;  ///< when this rank asked for the message
};

/// What goes before the bytes of a message. Both sides run one program on one kind of machine, so that it travels as it lies.
struct MessageHeader {
  uint32_t magic = 0x53484c57;  // "SHLW"
  int32_t comm = 0, from = 0, to = 0;
  int32_t is_answer = 0;
  int32_t rehearsal = 0;
  int64_t bytes = 0;
  double lay_s = 0;  ///< of an answer

  /// Bytes that follow.
  int64_t following() const { return is_answer == 0 && rehearsal == 0 ? bytes : 0; }
};

class MessageTransport : public Transport {
 public:
  std::unique_ptr<Communicator> join(int rank, CommId comm, std::span<const int> members) override;
  /// Sends a message to another process, behind those that were posted to it before. Does not wait. The bytes of the slices stay as they
  /// are until the answer has come. Safe from several threads.
  virtual void post(int process, const MessageHeader& header, std::span<const Slice> slices) = 0;

 protected:
  /// `placed` and `control` outlive the transport.
  MessageTransport(const kernels::Kernels& kernels, const PlacedPlan& placed, Control& control);

  Control& control() const { return control_; }
  /// A header has come: `message` of the channel has room for the bytes that follow.
  MessageChannel& begin(const MessageHeader& header);
  /// The first `bytes` bytes of a message are there, and more will come.
  void arrived(MessageChannel& channel, int64_t bytes);
  /// All of the message is there.
  void complete(const MessageHeader& header, MessageChannel& channel);

 private:
  using Key = std::tuple<int32_t, int, int>;  ///< communicator, rank here, rank there
  MessageChannel& channel(const Key& key);

  const kernels::Kernels& kernels_;
  Control& control_;
  const int ranks_here_;
  Channels inside_;  ///< between ranks of this process
  std::map<Key, std::unique_ptr<MessageChannel>> channels_;
};

}  // namespace shardlab::runtime
