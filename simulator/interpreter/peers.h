// The partners of each message: the simulated ranks, and for every message of a program its number, its group and its bytes.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <tuple>
#include <vector>

#include "plan/plan.h"
#include "plan/program.h"

namespace shardlab::simulator {

/// The ranks that are simulated: all of a mesh, or one representative a role.
class SimulatedRanks {
 public:
  SimulatedRanks(const Mesh& mesh, bool individually);

  const std::vector<int>& ranks() const { return ranks_; }
  /// Index into `ranks()` of the rank that stands for `rank`.
  int index_of(int rank) const;
  /// Index of the role that `rank` plays: its coordinate on the pipeline axis.
  int role_of(int rank) const;
  /// The ranks that simulated rank `rank` stands for: itself, or all of its role.
  const std::vector<int>& represented_by(int rank) const { return members_[static_cast<size_t>(index_of(rank))]; }

 private:
  const Mesh* mesh_;
  bool individually_;
  int pipeline_axis_ = -1;
  std::vector<int> ranks_;
  std::vector<std::vector<int>> members_;  ///< by rank of `ranks_`: the ranks that it stands for
};

/// The partners and the size of a communication instruction, before it moves data.
struct Meeting {
  /// Equal for all who meet: communicator, first and last party, direction (0 collective, 1 p2p), number of the
  /// message between them.
  using Key = std::tuple<int, int, int, int, int>;
  Key key{};
  int parties = 1;         ///< simulated ranks that must arrive; 1: nothing to wait for
  bool moves = true;       ///< false when the group is one rank or the hop leaves the axis: the op does nothing
  bool sender = false;     ///< of a p2p op: the receiver moves the data
  int member = 0;          ///< the rank's index in the group; in a message 0 is the sender, 1 the receiver
  int64_t sent_bytes = 0;  ///< by this rank
};

/// Meetings of a program by position in issue order; entries of instructions that do not communicate are unused.
std::vector<Meeting> meetings_of(const Plan& plan, const Program& program, const SimulatedRanks& simulated, int rank);

bool communicates(const Op& op);
bool communicates(const Instruction& instruction);

/// The communicator of a collective or p2p op.
const Comm& comm_of(const Plan& plan, const Op& op);

/// Sender and receiver of the message that member `index` of `group` sends (`op` is a Send) or receives (a Recv); nothing where the
/// hop leaves the group or leads back to the member itself.
std::optional<std::array<int, 2>> hop_of(const Op& op, std::span<const int> group, size_t index);

/// The ranks who meet, once for each meeting that the communication of `rank` stands for: a message's sender and receiver, or a
/// collective's group. An individual rank has one meeting. A representative has as many as differ among the ranks of its role.
std::vector<std::vector<int>> who_meet(const Plan& plan, const Op& op, const SimulatedRanks& simulated, int rank);

}  // namespace shardlab::simulator
