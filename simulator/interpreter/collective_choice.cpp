#include "simulator/interpreter/collective_choice.h"

#include <algorithm>
#include <bit>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "plan/automatic.h"
#include "plan/mesh.h"
#include "plan/program.h"
#include "plan/row_levels.h"
#include "plan/verify.h"
#include "plan/work.h"

namespace shardlab::simulator {
namespace {

/// Algorithms that a collective of a group may have beside the one that it has.
std::vector<Algorithm> alternatives(int ranks, int per_node) {
  std::vector<Algorithm> all{Algorithm::kRing, Algorithm::kDirect, Algorithm::kTree};
  if (ranks > 2 && std::has_single_bit(static_cast<unsigned>(ranks))) all.push_back(Algorithm::kHalvingDoubling);
  if (per_node > 1 && per_node < ranks) all.push_back(Algorithm::kHierarchical);
  return all;
}

/// An exchange of packed rows goes from rank to rank, as the ring does, or by node.
bool is_open(const Op& op, const Collective& c) {
  if (c.kind == CollectiveKind::kAllToAll) return moves_packed_rows(op) && c.algorithm == Algorithm::kRing;
  return c.algorithm == Algorithm::kRing || c.algorithm == Algorithm::kHalvingDoubling;
}

/// Prices algorithms of the collectives of a plan.
class Chooser {
 public:
  Chooser(const Case& config, const Plan& plan, const PlacedCostModel& costs) : config_(config), plan_(plan), costs_(costs) {}

  /// Seconds of `op`, a collective of `segment`, by each algorithm that its group can have; its own first. Of an exchange of all with all
  /// its own alone: no choice is open, but for packed rows, which go as a ring does or by node.
  std::vector<PricedCollective::Price> prices(const Segment& segment, Op op) {
    const Collective has = std::get<Collective>(op.work);
    const Members& group = members_of(has.comm);
    std::vector<PricedCollective::Price> all{{has.algorithm, seconds_of(segment, op, group.ranks)}};
    const bool exchange = has.kind == CollectiveKind::kAllToAll;
    if (exchange && !moves_packed_rows(op)) return all;
    for (const Algorithm algorithm : alternatives(static_cast<int>(group.ranks.size()), group.per_node)) {
      if (algorithm == has.algorithm) continue;
      if (exchange && algorithm != Algorithm::kHierarchical && algorithm != Algorithm::kRing) continue;
      put(algorithm, group, segment, op);
      all.push_back({algorithm, seconds_of(segment, op, group.ranks)});
    }
    return all;
  }

  /// Writes the algorithm into `op`, which is a collective of `segment`. Whether it is another.
  bool choose(const Segment& segment, Op& op) {
    const Collective before = std::get<Collective>(op.work);
    const Members& group = members_of(before.comm);
    if (group.ranks.size() < 2) return false;
    const auto all = prices(segment, op);
    const Algorithm best = std::ranges::min_element(all, {}, &PricedCollective::Price::seconds)->algorithm;  // the first of equals
    if (best == before.algorithm) return false;
    put(best, group, segment, op);
    return true;
  }

  /// One group of each communicator, and how many of its ranks share a node.
  struct Members {
    std::vector<int> ranks;
    int per_node = 1;
  };
  const Members& members_of(CommId comm) {
    const auto [found, is_new] = members_.try_emplace(comm.value);
    if (is_new) {
      const Comm& c = plan_.comms[comm.index()];
      found->second = {group_of(plan_.mesh, c, 0), group_per_node(plan_.mesh, c, ranks_per_node(config_))};
    }
    return found->second;
  }

 private:
  /// Gives `op`, a collective of `segment`, the algorithm. By node rows that are copies of tokens cross to a node once.
  void put(Algorithm algorithm, const Members& group, const Segment& segment, Op& op) const {
    auto& c = std::get<Collective>(op.work);
    c.algorithm = algorithm;
    c.per_node = algorithm == Algorithm::kHierarchical ? group.per_node : 1;
    if (config_.backend != BackendKind::kCuda) cross_once(segment, config_.model.experts, op);
  }
  double seconds_of(const Segment& segment, const Op& op, std::span<const int> ranks) const {
    Instruction instruction;
    instruction.kind = Instruction::Kind::kRun;
    instruction.segment = &segment;
    instruction.op = &op;
    return costs_.communicate_among(plan_, instruction, ranks, 1).value;
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
    for (size_t i = 0; i < segment.steps.size(); ++i) {
      Op* op = std::get_if<Op>(&segment.steps[i]);
      const auto* c = op != nullptr ? std::get_if<Collective>(&op->work) : nullptr;
      if (c == nullptr || !is_open(*op, *c) || !chooser.choose(segment, *op)) continue;
      changed = true;
      free_behind(segment, i);
    }
  // Rows that go by node are staged. On GPUs they go from rank to rank, whatever the plan says.
  if (changed && config.backend != BackendKind::kCuda) add_workspaces(plan, config.canonical);
  return changed;
}

Result<Plan> with_chosen_collectives(const Case& config, Result<Plan> plan, bool verified) {
  if (!plan.ok() || config.machine.local) return plan;
  const auto costs = cost_model_for(config);
  if (!costs.ok()) return plan;
  if (choose_collectives(config, *plan, **costs) && verified) SHARDLAB_TRY(verify(*plan));
  return plan;
}

namespace {

/// Calls of each segment in a step, by role.
std::vector<std::vector<int64_t>> calls_by_role(const Plan& plan) {
  std::vector<std::vector<int64_t>> calls;
  for (const Role& role : plan.roles) {
    auto& of_role = calls.emplace_back(plan.segments.size());
    for (const Item& item : role.program)
      if (const auto* call = std::get_if<Call>(&item)) ++of_role[call->segment.index()];
  }
  return calls;
}

int nodes_of(const std::vector<int>& ranks, int per_node) {
  std::vector<int> nodes;
  for (const int rank : ranks) nodes.push_back(rank / per_node);
  std::ranges::sort(nodes);
  return static_cast<int>(std::ranges::unique(nodes).begin() - nodes.begin());
}

}  // namespace

std::vector<PricedCollective> priced_collectives(const Case& config, const Plan& plan) {
  std::unique_ptr<PlacedCostModel> costs;  // none: nothing is priced
  if (!config.machine.local)
    if (auto model = cost_model_for(config); model.ok()) costs = std::move(model).value();
  const FixedCostModel unasked;
  const PlacedCostModel& model = costs ? *costs : static_cast<const PlacedCostModel&>(unasked);
  Chooser chooser(config, plan, model);
  const auto calls = calls_by_role(plan);
  using Key = std::tuple<std::string, std::string, int32_t, int64_t, Algorithm>;
  std::map<Key, std::pair<PricedCollective, std::vector<int64_t>>> found;  // with its runs by role
  for (size_t s = 0; s < plan.segments.size(); ++s)
    for (const Step& step : plan.segments[s].steps) {
      const Segment& segment = plan.segments[s];
      const Op* op = std::get_if<Op>(&step);
      const auto* c = op != nullptr ? std::get_if<Collective>(&op->work) : nullptr;
      if (c == nullptr) continue;
      const std::vector<int>& ranks = chooser.members_of(c->comm).ranks;
      if (ranks.size() < 2) continue;
      const int64_t bytes = cost_shape_of(plan, segment, *op)[0];
      const std::string label = segment.name + " " + op->label, kind(kind_of(op->work));
      auto& [row, runs] = found[{label, kind, c->comm.value, bytes, c->algorithm}];
      if (runs.empty()) {
        row = {label,
               kind,
               plan.comms[c->comm.index()].name,
               static_cast<int>(ranks.size()),
               nodes_of(ranks, ranks_per_node(config)),
               bytes,
               0,
               c->algorithm,
               {}};
        if (costs) row.prices = chooser.prices(segment, *op);
        std::ranges::stable_sort(row.prices, {}, &PricedCollective::Price::seconds);
        runs.resize(plan.roles.size());
      }
      for (size_t role = 0; role < plan.roles.size(); ++role) runs[role] += calls[role][s];
    }
  std::vector<PricedCollective> rows;
  for (auto& [key, entry] : found) {
    entry.first.runs = (*std::ranges::max_element(entry.second) + plan.period - 1) / plan.period;
    if (entry.first.runs > 0) rows.push_back(std::move(entry.first));
  }
  const auto seconds = [](const PricedCollective& row) {
    for (const auto& price : row.prices)
      if (price.algorithm == row.algorithm) return price.seconds * static_cast<double>(row.runs);
    return 0.0;
  };
  std::ranges::stable_sort(rows, [&](const PricedCollective& a, const PricedCollective& b) {
    return std::tuple(seconds(a), a.bytes * a.runs) > std::tuple(seconds(b), b.bytes * b.runs);
  });
  return rows;
}

}  // namespace shardlab::simulator
