// Many ranks on one device: every layout runs and can be checked where there is one GPU.
//
// A collective is a meeting on the host. Each rank records an event on its stream and says that it has arrived; the first of the
// group then makes its own stream wait for all of them and launches the one kernel that works for every rank; the others make their
// streams wait for its end. A message is a copy that the receiver issues in the same way. No kernel ever waits for another, so
// nothing that the device does with them can deadlock, and what the host does is what `verify` has proved to end.
//
//   rank 0 (leads)                 rank 1                        rank 2
//   record ready0                  record ready1                 record ready2
//   wait for 1, 2 to arrive        arrive                        arrive
//   stream waits ready1, ready2    wait for the launch           wait for the launch
//   launch, record done            stream waits done             stream waits done
//
// Sums are taken in the canonical order, by the tree over the ranks in group order, whatever the algorithm is called; bytes sent
// are those that the named algorithm would send. Times say what the device's memory takes, not a network: results are labelled so.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

#include "runtime/cuda/node.h"
#include "runtime/transport.h"

namespace shardlab::runtime::cuda {

/// One communicator's group of ranks, as they meet.
struct Meeting {
  struct Member {
    Counter arrived;
    EventHandle ready;
    CollectiveCall call;  ///< written before `arrived` advances
  };
  std::vector<int> ranks;
  std::vector<std::unique_ptr<Member>> members;  ///< by group index
  Counter launched;
  EventHandle done;
  int32_t leader_instruction = -1;  ///< written before `launched` advances
};

/// One direction between two ranks of one communicator.
struct Handover {
  Counter posted, taken;
  EventHandle ready, done;
  const void* data = nullptr;  ///< of the message on offer. Written before `posted` advances
  int64_t bytes = 0;
  int32_t receiver_instruction = -1;  ///< written before `taken` advances
};

class OneGpuTransport final : public Transport {
 public:
  explicit OneGpuTransport(Node& node) : node_(node) {}
  std::unique_ptr<Communicator> join(int rank, CommId comm, std::span<const int> members) override;
  bool counts_wire() const override { return false; }  // nothing is sent: one kernel reads and writes every rank's memory

 private:
  Meeting& meeting(CommId comm, std::span<const int> members);
  Handover& handover(CommId comm, int from, int to);

  Node& node_;
  std::mutex mutex_;
  std::map<std::pair<int32_t, int>, std::unique_ptr<Meeting>> meetings_;  ///< by communicator and first member
  std::map<std::tuple<int32_t, int, int>, std::unique_ptr<Handover>> handovers_;
};

}  // namespace shardlab::runtime::cuda
