// Ranks in several processes on any machines: messages go over TCP, with two connections for each pair of processes. One has messages, the
// other answers: an answer that waited behind a long message the other way would keep its sender from the next step.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "runtime/message_transport.h"
#include "runtime/socket.h"

namespace shardlab::runtime {

class TcpTransport final : public MessageTransport {
 public:
  /// Every process of the group creates one for the same plan; each connects to all others. `address`: where this process listens,
  /// for the others; empty: as the control plane is reached. Throws WorldError where one cannot be reached.
  TcpTransport(const kernels::Kernels& kernels, const PlacedPlan& placed, Control& control, double timeout_s);
  ~TcpTransport() override;
  void post(int process, const MessageHeader& header, std::span<const Slice> slices) override;

 private:
  /// Something to be written: a header and the slices of a message, which lie where they did.
  struct Outgoing {
    MessageHeader header;
    std::vector<Slice> slices;
    int64_t written = 0;
  };
  /// A connection to another process.
  struct Link {
    FileDescriptor socket;
    std::mutex mutex;  ///< guards the queue
    std::deque<Outgoing> queue;
    MessageHeader header;  ///< of the message that is being read
    int64_t read = 0;
    MessageChannel* into = nullptr;
    bool lost = false;
  };

  static constexpr int kLanes = 2, kMessages = 0, kAnswers = 1;
  size_t place_of(int process, int64_t lane) const { return static_cast<size_t>(process) * kLanes + static_cast<size_t>(lane); }

  void connect_all(double timeout_s);
  void progress();
  bool write_some(Link& link);
  bool read_some(Link& link);
  void wake();

  std::vector<std::unique_ptr<Link>> links_;  ///< by process and lane; none to this one
  FileDescriptor wake_;                       ///< an eventfd: something is to be written, or the end
  std::atomic<bool> ends_{false};
  std::thread thread_;
};

}  // namespace shardlab::runtime
