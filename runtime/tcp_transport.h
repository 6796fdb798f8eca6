// Ranks in several processes on any machines: messages go over TCP, one connection for each pair of processes.
//
// A message is offered to the process's own progress thread, which writes its slices and reads what comes, and the receiver's
// `release` is answered to the sender: a rendezvous as on every wire. What comes is kept until its receiver asks for it, at most
// one message for each (communicator, sender, receiver): memory beside the plan.
#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <tuple>
#include <vector>

#include "kernels/kernels.h"
#include "runtime/control.h"
#include "runtime/session.h"
#include "runtime/thread_transport.h"

namespace shardlab::runtime {

/// The two ends, in this process, of the messages between one of its ranks and one of another process on one communicator.
struct TcpChannel {
  Counter answered;  ///< messages of this rank that the peer has released
  Counter came;      ///< messages of the peer that are here
  uint64_t offered = 0, read = 0;
  std::vector<std::byte> message;  ///< the last that came. Written before `came` advances
  bool rehearsal = false;          ///< it has a length and no bytes
  int64_t bytes = 0;
  double began = 0;       ///< when its first byte came
  double complete = 0;    ///< when its last did
  double lay_s = 0;       ///< how long the peer left the last answered message lie before it asked for it
  double read_begin = 0;  ///< when this rank asked for the message
};

class TcpTransport final : public Transport {
 public:
  /// Every process of the group creates one for the same plan; each connects to all others. `address`: where this process listens,
  /// for the others; empty: as the control plane is reached. Throws WorldError where one cannot be reached.
  TcpTransport(const kernels::Kernels& kernels, const PlacedPlan& placed, Control& control, double timeout_s);
  ~TcpTransport() override;
  std::unique_ptr<Communicator> join(int rank, CommId comm, std::span<const int> members) override;

  /// What goes over a connection before the bytes of a message.
  struct Header {
    uint32_t magic = 0x53484c57;  // "SHLW"
    int32_t comm = 0, from = 0, to = 0;
    int32_t is_answer = 0;
    int32_t rehearsal = 0;
    int64_t bytes = 0;
    double lay_s = 0;  ///< of an answer
  };

 private:
  friend class TcpWire;
  using Key = std::tuple<int32_t, int, int>;  ///< communicator, rank here, rank there
  /// Something to be written: a header and the slices of a message, which lie where they did.
  struct Outgoing {
    Header header;
    std::vector<Slice> slices;
    int64_t written = 0;
  };
  /// A connection to another process.
  struct Link {
    FileDescriptor socket;
    std::mutex mutex;  ///< guards the queue
    std::deque<Outgoing> queue;
    Header header;  ///< of the message that is being read
    int64_t read = 0;
    TcpChannel* into = nullptr;
    bool lost = false;
  };

  void connect_all(double timeout_s);
  TcpChannel& channel(const Key& key);
  void post(int process, Header header, std::span<const Slice> slices);
  void progress();
  bool write_some(Link& link);
  bool read_some(Link& link);
  void arrived(Link& link);
  void wake();

  const kernels::Kernels& kernels_;
  Control& control_;
  const int ranks_here_;
  Channels inside_;                           ///< between ranks of this process
  std::vector<std::unique_ptr<Link>> links_;  ///< by process; none to this one
  std::mutex channels_mutex_;
  std::map<Key, std::unique_ptr<TcpChannel>> channels_;
  FileDescriptor wake_;  ///< an eventfd: something is to be written, or the end
  std::atomic<bool> ends_{false};
  std::thread thread_;
};

}  // namespace shardlab::runtime
