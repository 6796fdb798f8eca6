#include "simulator/interpreter/mixed_costs.h"

#include <algorithm>
#include <utility>

#include "plan/base/check.h"
#include "simulator/interpreter/peers.h"

namespace shardlab::simulator {

MixedCostModel::MixedCostModel(const Machine& machine, std::vector<std::unique_ptr<PlacedCostModel>> kinds,
                               std::unique_ptr<PlacedCostModel> between)
    : machine_(machine), kinds_(std::move(kinds)), between_(std::move(between)) {
  SHARDLAB_CHECK(kinds_.size() == machine.kinds.size() && machine.is_mixed(), "{} cost models for {} kinds", kinds_.size(),
                 machine.kinds.size());
}

KindRange MixedCostModel::kinds_of(const Plan& plan, const Instruction& instruction) const {
  if (instruction.role < 0) return {0, static_cast<int>(kinds_.size()) - 1};
  return kinds_of_stage(machine_, plan.mesh, instruction.role);
}

const PlacedCostModel& MixedCostModel::slowest(const Plan& plan, const Instruction& instruction, int busy_cores) const {
  const KindRange range = kinds_of(plan, instruction);
  const PlacedCostModel* worst = kinds_[static_cast<size_t>(range.first)].get();
  if (range.one()) return *worst;
  Seconds most = worst->compute(plan, instruction, busy_cores);
  for (int kind = range.first + 1; kind <= range.last; ++kind) {
    const PlacedCostModel& model = *kinds_[static_cast<size_t>(kind)];
    if (const Seconds seconds = model.compute(plan, instruction, busy_cores); seconds > most) worst = &model, most = seconds;
  }
  return *worst;
}

const PlacedCostModel& MixedCostModel::joining(std::span<const int> ranks) const {
  const auto [first, last] = std::ranges::minmax(ranks);
  const KindRange range = kinds_of_ranks(machine_, first, last);
  return range.one() ? *kinds_[static_cast<size_t>(range.first)] : *between_;
}

Seconds MixedCostModel::compute(const Plan& plan, const Instruction& instruction, int busy_cores) const {
  return slowest(plan, instruction, busy_cores).compute(plan, instruction, busy_cores);
}

/// The slowest of all groups of the communicator: of a message, of all its hops.
Seconds MixedCostModel::communicate(const Plan& plan, const Instruction& instruction, int busy_cores) const {
  const Comm& comm = comm_of(plan, *instruction.op);
  const bool collective = std::holds_alternative<Collective>(instruction.op->work);
  Seconds most(0);
  for (int rank = 0; rank < plan.mesh.world_size(); ++rank) {
    const std::vector<int> group = group_of(plan.mesh, comm, rank);
    if (collective) {
      if (group.front() == rank) most = std::max(most, communicate_among(plan, instruction, group, busy_cores));
      continue;
    }
    const auto index = static_cast<size_t>(std::ranges::find(group, rank) - group.begin());
    if (const auto hop = hop_of(*instruction.op, group, index))
      most = std::max(most, communicate_among(plan, instruction, *hop, busy_cores));
  }
  return most;
}

Seconds MixedCostModel::communicate_among(const Plan& plan, const Instruction& instruction, std::span<const int> ranks,
                                          int busy_cores) const {
  return joining(ranks).communicate_among(plan, instruction, ranks, busy_cores);
}

Demand MixedCostModel::demand(const Plan& plan, const Instruction& instruction, std::span<const int> ranks, Seconds alone) const {
  return (ranks.empty() ? slowest(plan, instruction, 1) : joining(ranks)).demand(plan, instruction, ranks, alone);
}

bool MixedCostModel::extrapolates(const Plan& plan, const Instruction& instruction) const {
  return std::ranges::any_of(kinds_, [&](const auto& kind) { return kind->extrapolates(plan, instruction); });
}

Machine between_kinds(const Machine& machine) {
  Machine between = machine;
  between.kinds.clear();
  return between;
}

Result<std::unique_ptr<PlacedCostModel>> mixed_costs(const Machine& machine, Precision precision) {
  std::vector<std::unique_ptr<PlacedCostModel>> kinds;
  for (const Machine& kind : machine.kinds) {
    auto model = cost_model_for(kind, precision);
    if (!model.ok()) return model.error();
    kinds.push_back(std::move(*model));
  }
  auto between = cost_model_for(between_kinds(machine), precision);
  if (!between.ok()) return between.error();
  return std::unique_ptr<PlacedCostModel>(std::make_unique<MixedCostModel>(machine, std::move(kinds), std::move(*between)));
}

}  // namespace shardlab::simulator
