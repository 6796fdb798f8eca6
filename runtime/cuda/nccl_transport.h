// One device a rank, joined by NCCL; all ranks are threads of this process.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "runtime/cuda/nccl_api.h"
#include "runtime/cuda/nccl_calls.h"
#include "runtime/cuda/node.h"
#include "runtime/session.h"
#include "runtime/transport.h"

namespace shardlab::runtime::cuda {

/// Communicators are those that the plan names, one for each of their groups. A group's communicator is made once its last member
/// has joined, for all members at once. One tiny call of each kind is then made on it: NCCL sets things up lazily, and its
/// host-side handshakes would otherwise fall into the first step.
///
/// Calls are the ones of `nccl_calls`, made in issue order on each device (a ticket that every call takes), whatever the streams:
/// NCCL's kernels of two communicators must come in one order on all devices. NCCL chooses the algorithm; bytes sent are counted as
/// those of the algorithm that the plan names.
class NcclTransport final : public Transport {
 public:
  /// `node`: none makes a rehearsal with a dry back end, on null streams and pointers. All must outlive the transport. Refuses a
  /// plan that NCCL cannot carry out (see `nccl_calls`).
  static Result<std::unique_ptr<NcclTransport>> create(NcclApi& nccl, const PlacedPlan& placed, Node* node);
  ~NcclTransport() override;

  std::unique_ptr<Communicator> join(int rank, CommId comm, std::span<const int> members) override;
  bool counts_wire() const override { return false; }  // NCCL chooses its algorithm
  /// Aborts every communicator: kernels that wait for a peer end.
  void abort() override;
  /// A rank's handle on a communicator; null before its group is complete, or for a rank that did not join it.
  NcclHandle handle(int rank, CommId comm) const;

 private:
  friend class NcclCommunicator;
  /// The calls of one rank and how many of its ops have been issued since the first step.
  struct Order {
    std::vector<NcclOp> ops;
    Counter issued;
  };
  /// One communicator of a group.
  struct Group {
    std::vector<int> ranks;
    std::vector<NcclHandle> handles;  ///< by group index; null until all have joined
    std::vector<bool> joined;
    NcclId id;
  };

  NcclTransport(NcclApi& nccl, const PlacedPlan& placed, Node* node) : nccl_(nccl), placed_(placed), node_(node) {}
  void check(NcclStatus status, std::string_view call) const;
  void connect(CommId comm, Group& group);
  void warm_up(CommId comm, Group& group);
  bool uses(int rank, CommId comm, NcclCall::Kind kind, int peer) const;
  void attach(int rank) const;
  StreamHandle stream(int rank, int stream) const;

  NcclApi& nccl_;
  const PlacedPlan& placed_;
  Node* const node_;
  std::vector<std::unique_ptr<Order>> orders_;                        ///< by rank
  std::mutex mutex_;                                                  ///< guards the two below
  std::map<std::pair<int32_t, int>, std::unique_ptr<Group>> groups_;  ///< by communicator and first member
  bool aborted_ = false;
};

}  // namespace shardlab::runtime::cuda
