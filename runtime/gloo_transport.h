// Ranks in several processes on any machines: messages go over Gloo, which is what PyTorch trains with on CPUs.
//
// Only messages are Gloo's. Order and sums of collectives are our own (runtime/stepped_communicator.h), so that the bits are those of
// every other wire. Processes find one another through the control plane.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "runtime/gloo/mesh.h"
#include "runtime/message_transport.h"

namespace shardlab::runtime {

/// The library that knows Gloo, opened.
class GlooLibrary {
 public:
  /// Refuses (ExitCode::kEnvironment) a build without Gloo, and a machine without it.
  static Result<GlooLibrary> open(const std::string& file);
  GlooMesh* connect(const GlooWish& wish, std::string& error) const { return connect_(wish, error); }

 private:
  explicit GlooLibrary(GlooConnect* connect) : connect_(connect) {}
  GlooConnect* connect_;
};

/// The connections of this process, made once and shared by all that it runs.
class GlooWorld {
 public:
  /// Every process of the group connects at once. Throws WorldError where one cannot be reached.
  GlooWorld(const GlooLibrary& library, Control& control, double timeout_s);
  /// Connections end once nobody needs them, or with a group that has failed.
  ~GlooWorld();
  GlooWorld(const GlooWorld&) = delete;

  GlooMesh& mesh() { return *mesh_; }
  /// A number that no other transport of this process has, the same in every process.
  uint64_t next_slot() { return next_slot_++; }

 private:
  Control& control_;
  std::unique_ptr<GlooMesh> mesh_;
  uint64_t next_slot_ = 0;
};

class GlooTransport final : public MessageTransport {
 public:
  /// Every process of the group creates one for the same plan. `world` outlives it.
  GlooTransport(const kernels::Kernels& kernels, const PlacedPlan& placed, Control& control, GlooWorld& world);
  ~GlooTransport() override;
  void post(int process, const MessageHeader& header, std::span<const Slice> slices) override;

 private:
  struct Outgoing {
    MessageHeader header;
    std::vector<Slice> slices;
  };
  /// Gloo's calls block, so that each process has a thread for each way.
  struct Peer {
    std::mutex mutex;  ///< guards the three below
    std::deque<Outgoing> queue;
    bool ends = false, sent = false;  ///< to be ended; nothing is sent any more
    std::condition_variable changed;
    std::thread sender, receiver;
  };

  void send_all(int process, Peer& peer);
  void receive_all(int process);
  bool send(int process, const Outgoing& message, std::vector<std::byte>& packed);

  GlooWorld& world_;
  const uint64_t slot_;
  std::vector<std::unique_ptr<Peer>> peers_;  ///< by process; none to this one
};

}  // namespace shardlab::runtime
