#include "simulator/peers.h"

#include <algorithm>
#include <map>
#include <optional>

#include "plan/collective_steps.h"

namespace shardlab {
namespace {

/// Meetings of one rank, in issue order of its program.
class Meetings {
 public:
  Meetings(const Plan& plan, const Program& program, const SimulatedRanks& simulated, int rank)
      : plan_(plan), program_(program), simulated_(simulated), rank_(rank) {
    for (const Comm& comm : plan.comms) groups_.push_back(group_of(plan.mesh, comm, rank));
  }

  Meeting collective(const Instruction& i, const Collective& c) {
    const std::vector<int>& group = groups_[c.comm.index()];
    Meeting m;
    m.moves = group.size() > 1;
    if (!m.moves) return m;
    std::vector<int> parties;
    for (const int member : group) parties.push_back(simulated_.index_of(member));
    std::sort(parties.begin(), parties.end());
    parties.erase(std::unique(parties.begin(), parties.end()), parties.end());
    m.parties = static_cast<int>(parties.size());
    m.key = numbered(c.comm, parties.front(), parties.back(), 0);
    m.sent_bytes = sent_by_collective(i, c, group);
    return m;
  }

  Meeting point_to_point(const Instruction& i, CommId comm, int hop, bool cyclic, bool sender) {
    Meeting m;
    m.sender = sender;
    const std::optional<int> peer = peer_of(comm, hop, cyclic);
    m.moves = peer.has_value() && *peer != rank_;
    if (!m.moves) return m;
    const int me = simulated_.index_of(rank_), other = simulated_.index_of(*peer);
    m.key = numbered(comm, sender ? me : other, sender ? other : me, 1);
    m.parties = me == other ? 1 : 2;  // a representative's peer does what it does, at the same moment
    m.sent_bytes = sender ? program_.reads(i)[0].bytes : 0;
    return m;
  }

 private:
  Meeting::Key numbered(CommId comm, int first, int last, int direction) {
    Meeting::Key key{comm.value, first, last, direction, 0};
    std::get<4>(key) = count_[key]++;
    return key;
  }

  std::optional<int> peer_of(CommId comm, int hop, bool cyclic) const {
    const std::vector<int>& group = groups_[comm.index()];
    const int size = static_cast<int>(group.size());
    const int mine = static_cast<int>(std::find(group.begin(), group.end(), rank_) - group.begin());
    const int index = cyclic ? ((mine + hop) % size + size) % size : mine + hop;
    if (index < 0 || index >= size) return std::nullopt;
    return group[static_cast<size_t>(index)];
  }

  int64_t sent_by_collective(const Instruction& i, const Collective& c, const std::vector<int>& group) {
    const int index = static_cast<int>(std::find(group.begin(), group.end(), rank_) - group.begin());
    const Type* full = program_.reads(i)[0].type;
    if (c.kind == CollectiveKind::kAllGather) full = program_.writes(i)[0].type;
    const auto known = sent_.find(i.op);
    if (known != sent_.end()) return known->second;
    const int64_t elements =
        sent_elements(c.kind, c.algorithm, full->shape.elements(), static_cast<int>(group.size()), index, c.root);
    return sent_[i.op] = bytes_of(full->dtype, elements);
  }

  const Plan& plan_;
  const Program& program_;
  const SimulatedRanks& simulated_;
  int rank_;
  std::vector<std::vector<int>> groups_;
  std::map<Meeting::Key, int> count_;  ///< messages so far, keyed with number 0
  std::map<const Op*, int64_t> sent_;
};

}  // namespace

SimulatedRanks::SimulatedRanks(const Mesh& mesh, bool individually) : mesh_(&mesh), individually_(individually) {
  if (const auto axis = mesh.find("pp")) pipeline_axis_ = *axis;
  if (individually) {
    for (int rank = 0; rank < mesh.world_size(); ++rank) ranks_.push_back(rank);
    return;
  }
  for (int stage = 0; stage < mesh.size("pp"); ++stage) {
    Coordinates c{};
    if (pipeline_axis_ >= 0) c[static_cast<size_t>(pipeline_axis_)] = stage;
    ranks_.push_back(mesh.rank(c));
  }
}

int SimulatedRanks::role_of(int rank) const {
  return pipeline_axis_ < 0 ? 0 : mesh_->coordinates(rank)[static_cast<size_t>(pipeline_axis_)];
}

int SimulatedRanks::index_of(int rank) const { return individually_ ? rank : role_of(rank); }

bool communicates(const Instruction& i) {
  if (i.op == nullptr) return false;
  const Work& w = i.op->work;
  return std::holds_alternative<Collective>(w) || std::holds_alternative<Send>(w) || std::holds_alternative<Recv>(w);
}

std::vector<Meeting> meetings_of(const Plan& plan, const Program& program, const SimulatedRanks& simulated, int rank) {
  Meetings meetings(plan, program, simulated, rank);
  std::vector<Meeting> all(program.instructions.size());
  for (const Instruction& i : program.instructions) {
    if (!communicates(i)) continue;
    Meeting& m = all[static_cast<size_t>(i.id)];
    if (const auto* c = std::get_if<Collective>(&i.op->work)) m = meetings.collective(i, *c);
    if (const auto* s = std::get_if<Send>(&i.op->work)) m = meetings.point_to_point(i, s->comm, s->hop, s->cyclic, true);
    if (const auto* r = std::get_if<Recv>(&i.op->work)) m = meetings.point_to_point(i, r->comm, r->hop, r->cyclic, false);
  }
  return all;
}

}  // namespace shardlab
