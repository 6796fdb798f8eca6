#include "simulator/interpreter/collective_choice.h"

#include <bit>
#include <map>
#include <tuple>
#include <vector>

#include "plan/automatic.h"
#include "plan/mesh.h"
#include "plan/program.h"
#include "plan/verify.h"

namespace shardlab::simulator {
namespace {

/// Algorithms that a collective of a group may have beside the one that it has.
std::vector<Algorithm> alternatives(int ranks, int per_node) {
  std::vector<Algorithm> all{Algorithm::kRing, Algorithm::kDirect, Algorithm::kTree};
  if (ranks > 2 && std::has_single_bit(static_cast<unsigned>(ranks))) all.push_back(Algorithm::kHalvingDoubling);
  if (per_node > 1 && per_node < ranks) all.push_back(Algorithm::kHierarchical);
  return all;
}

bool is_open(const Collective& c) {
  return c.kind != CollectiveKind::kAllToAll && (c.algorithm == Algorithm::kRing || c.algorithm == Algorithm::kHalvingDoubling);
}

/// One group of each communicator, and how many of its ranks share a node.
struct Members {
  std::vector<int> ranks;
  int per_node = 1;
};

class Chooser {
 public:
  Chooser(const Case& config, const Plan& plan, const PlacedCostModel& costs) : config_(config), plan_(plan), costs_(costs) {}

  /// Writes the algorithm into `op`, which is a collective of `segment`. Whether it is another.
  bool choose(const Segment& segment, Op& op) {
    const Collective before = std::get<Collective>(op.work);
    const Members& group = members_of(before.comm);
    const int ranks = static_cast<int>(group.ranks.size());
    if (ranks < 2) return false;
    Collective best = before;
    double least = seconds_of(segment, op, group.ranks);
    for (const Algorithm algorithm : alternatives(ranks, group.per_node)) {
      Collective& c = std::get<Collective>(op.work);
      c = before;
      c.algorithm = algorithm;
      if (algorithm == Algorithm::kHierarchical) c.per_node = group.per_node;
      const double seconds = seconds_of(segment, op, group.ranks);
      if (seconds < least) least = seconds, best = c;
    }
    std::get<Collective>(op.work) = best;
    return best.algorithm != before.algorithm;
  }

 private:
  double seconds_of(const Segment& segment, const Op& op, std::span<const int> ranks) const {
    Instruction instruction;
    instruction.kind = Instruction::Kind::kRun;
    instruction.segment = &segment;
    instruction.op = &op;
    return costs_.communicate_among(plan_, instruction, ranks, 1).value;
  }
  const Members& members_of(CommId comm) {
    const auto [found, is_new] = members_.try_emplace(comm.value);
    if (is_new) {
      const Comm& c = plan_.comms[comm.index()];
      found->second = {group_of(plan_.mesh, c, 0), group_per_node(plan_.mesh, c, ranks_per_node(config_))};
    }
    return found->second;
  }

  const Case& config_;
  const Plan& plan_;
  const PlacedCostModel& costs_;
  std::map<int32_t, Members> members_;
};

}  // namespace

bool choose_collectives(const Case& config, Plan& plan, const PlacedCostModel& costs) {
  if (config.layout.collective_algorithm != AlgorithmChoice::kAuto || config.canonical || config.machine.local) return false;
  Chooser chooser(config, plan, costs);
  bool changed = false;
  for (Segment& segment : plan.segments)
    for (Step& step : segment.steps) {
      Op* op = std::get_if<Op>(&step);
      const auto* c = op != nullptr ? std::get_if<Collective>(&op->work) : nullptr;
      if (c != nullptr && is_open(*c)) changed |= chooser.choose(segment, *op);
    }
  return changed;
}

Result<Plan> with_chosen_collectives(const Case& config, Result<Plan> plan, bool verified) {
  if (!plan.ok() || config.machine.local) return plan;
  const auto costs = cost_model_for(config);
  if (!costs.ok()) return plan;
  if (choose_collectives(config, *plan, **costs) && verified) SHARDLAB_TRY(verify(*plan));
  return plan;
}

}  // namespace shardlab::simulator
