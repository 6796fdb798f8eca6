#include "simulator/interpreter/peers.h"

#include <algorithm>
#include <map>

#include "plan/wire.h"

namespace shardlab::simulator {
namespace {

/// Meetings of one rank, in issue order of its program.
class Meetings {
 public:
  Meetings(const Plan& plan, const Program& program, const SimulatedRanks& simulated, int rank)
      : program_(program), simulated_(simulated), rank_(rank) {
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
    m.member = static_cast<int>(std::find(group.begin(), group.end(), rank_) - group.begin());
    m.key = numbered(c.comm, parties.front(), parties.back(), 0);
    m.sent_bytes = sent_by_collective(i, group, m.member);
    return m;
  }

  Meeting point_to_point(const Instruction& i, CommId comm, bool sender) {
    Meeting m;
    m.sender = sender;
    m.member = sender ? 0 : 1;
    const std::vector<int>& group = groups_[comm.index()];
    const auto hop = hop_of(*i.op, group, static_cast<size_t>(std::find(group.begin(), group.end(), rank_) - group.begin()));
    m.moves = hop.has_value();
    if (!m.moves) return m;
    const int from = simulated_.index_of((*hop)[0]), to = simulated_.index_of((*hop)[1]);
    m.key = numbered(comm, from, to, 1);
    m.parties = from == to ? 1 : 2;  // a representative's peer does what it does, at the same moment
    m.sent_bytes = sender ? program_.reads(i)[0].bytes : 0;
    return m;
  }

 private:
  Meeting::Key numbered(CommId comm, int first, int last, int direction) {
    Meeting::Key key{comm.value, first, last, direction, 0};
    std::get<4>(key) = count_[key]++;
    return key;
  }

  int64_t sent_by_collective(const Instruction& i, const std::vector<int>& group, int index) {
    const auto [sent, is_new] = sent_.try_emplace(i.op, 0);
    if (is_new) sent->second = sent_bytes(*i.segment, *i.op, static_cast<int>(group.size()), index);
    return sent->second;
  }

  const Program& program_;
  const SimulatedRanks& simulated_;
  int rank_;
  std::vector<std::vector<int>> groups_;
  std::map<Meeting::Key, int> count_;  ///< messages so far, keyed with number 0
  std::map<const Op*, int64_t> sent_;
};

}  // namespace

SimulatedRanks::SimulatedRanks(const Mesh& mesh, bool individually) : mesh_(&mesh), individually_(individually) {
  if (const auto axis = mesh.find(kPipelineAxis)) pipeline_axis_ = *axis;
  if (individually) {
    for (int rank = 0; rank < mesh.world_size(); ++rank) ranks_.push_back(rank), members_.push_back({rank});
    return;
  }
  for (int stage = 0; stage < mesh.size(kPipelineAxis); ++stage) {
    Coordinates c{};
    if (pipeline_axis_ >= 0) c[static_cast<size_t>(pipeline_axis_)] = stage;
    ranks_.push_back(mesh.rank(c));
  }
  members_.resize(ranks_.size());
  for (int rank = 0; rank < mesh.world_size(); ++rank) members_[static_cast<size_t>(role_of(rank))].push_back(rank);
}

int SimulatedRanks::role_of(int rank) const {
  return pipeline_axis_ < 0 ? 0 : mesh_->coordinates(rank)[static_cast<size_t>(pipeline_axis_)];
}

int SimulatedRanks::index_of(int rank) const { return individually_ ? rank : role_of(rank); }

bool communicates(const Instruction& i) { return i.op != nullptr && communicates(*i.op); }

bool communicates(const Op& op) {
  const Work& w = op.work;
  return std::holds_alternative<Collective>(w) || std::holds_alternative<Send>(w) || std::holds_alternative<Recv>(w);
}

const Comm& comm_of(const Plan& plan, const Op& op) {
  const CommId id = std::visit(Overload{
                                   [](const Collective& c) { return c.comm; },
                                   [](const Send& s) { return s.comm; },
                                   [](const Recv& r) { return r.comm; },
                                   [](const auto&) { return CommId{}; },
                               },
                               op.work);
  SHARDLAB_CHECK(id && id.index() < plan.comms.size(), "op `{}` has no communicator", op.label);
  return plan.comms[id.index()];
}

std::optional<std::array<int, 2>> hop_of(const Op& op, std::span<const int> group, size_t index) {
  const auto* send = std::get_if<Send>(&op.work);
  const auto* receive = std::get_if<Recv>(&op.work);
  SHARDLAB_CHECK(send != nullptr || receive != nullptr, "op `{}` sends no message", op.label);
  const int hop = send != nullptr ? send->hop : receive->hop;
  const bool cyclic = send != nullptr ? send->cyclic : receive->cyclic;
  const int size = static_cast<int>(group.size()), mine = static_cast<int>(index);
  const int peer = cyclic ? ((mine + hop) % size + size) % size : mine + hop;
  if (peer < 0 || peer >= size || peer == mine) return std::nullopt;
  const std::array<int, 2> there{group[index], group[static_cast<size_t>(peer)]};
  return send != nullptr ? there : std::array<int, 2>{there[1], there[0]};
}

std::vector<std::vector<int>> who_meet(const Plan& plan, const Op& op, const SimulatedRanks& simulated, int rank) {
  const Comm& comm = comm_of(plan, op);
  const bool collective = std::holds_alternative<Collective>(op.work);
  const auto pipeline = plan.mesh.find(kPipelineAxis);
  const auto first_of_its_group = [&](int member) {
    const Coordinates c = plan.mesh.coordinates(member);
    for (int a = 0; a < static_cast<int>(plan.mesh.axes.size()); ++a)
      if (comm.axes.contains(a) && a != pipeline && c[static_cast<size_t>(a)] != 0) return false;
    return true;
  };
  std::vector<std::vector<int>> sets;
  for (const int member : simulated.represented_by(rank)) {
    if (collective && member != rank && !first_of_its_group(member)) continue;  // each group once
    std::vector<int> group = group_of(plan.mesh, comm, member);
    if (collective) {
      sets.push_back(std::move(group));
      continue;
    }
    const auto at = std::find(group.begin(), group.end(), member) - group.begin();
    if (const auto hop = hop_of(op, group, static_cast<size_t>(at))) sets.push_back({(*hop)[0], (*hop)[1]});
  }
  return sets;
}

std::vector<Meeting> meetings_of(const Plan& plan, const Program& program, const SimulatedRanks& simulated, int rank) {
  Meetings meetings(plan, program, simulated, rank);
  std::vector<Meeting> all(program.instructions.size());
  for (const Instruction& i : program.instructions) {
    if (!communicates(i)) continue;
    Meeting& m = all[static_cast<size_t>(i.id)];
    if (const auto* c = std::get_if<Collective>(&i.op->work)) m = meetings.collective(i, *c);
    if (const auto* s = std::get_if<Send>(&i.op->work)) m = meetings.point_to_point(i, s->comm, true);
    if (const auto* r = std::get_if<Recv>(&i.op->work)) m = meetings.point_to_point(i, r->comm, false);
  }
  return all;
}

}  // namespace shardlab::simulator
