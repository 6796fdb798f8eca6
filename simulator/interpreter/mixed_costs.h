// Costs on a machine of several kinds of devices: each stage's ops at the rates of its own device.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "plan/base/result.h"
#include "plan/kinds.h"
#include "simulator/interpreter/cost_model.h"

namespace shardlab::simulator {

/// Costs of a mixed machine.
///
/// Formula: an op of stage s takes what the cost model of the stage's kind says. Where the ranks of a stage lie on several kinds it takes the
///   longest over them, since replicas have equal batches and meet in every sum. A message or collective whose ranks lie on one kind
///   takes what that kind's links give; one whose ranks lie on several takes what the links between kinds give: `inter_bytes_per_s` of the
///   mixed machine between nodes, and within a node the slowest kind's link.
/// Units: seconds.
/// Source: the data sheets of the kinds; the links between kinds are stated in the machine file.
/// Valid when: no kind is calibrated or local. An op of no stage (`Instruction::role` -1) takes the longest over all kinds.
class MixedCostModel final : public PlacedCostModel {
 public:
  /// `kinds`: by index of `machine.kinds`. `between`: of ranks on several kinds. Host costs are those of `between`.
  MixedCostModel(const Machine& machine, std::vector<std::unique_ptr<PlacedCostModel>> kinds,
                 std::unique_ptr<PlacedCostModel> between);

  Seconds compute(const Plan& plan, const Instruction& instruction, int busy_cores) const override;
  Seconds communicate(const Plan& plan, const Instruction& instruction, int busy_cores) const override;
  Seconds communicate_among(const Plan& plan, const Instruction& instruction, std::span<const int> ranks,
                            int busy_cores) const override;
  Demand demand(const Plan& plan, const Instruction& instruction, std::span<const int> ranks, Seconds alone) const override;
  Seconds dispatch() const override { return between_->dispatch(); }
  Seconds wake() const override { return between_->wake(); }
  bool differs_by_stage() const override { return true; }
  bool extrapolates(const Plan& plan, const Instruction& instruction) const override;

 private:
  KindRange kinds_of(const Plan& plan, const Instruction& instruction) const;
  /// The kind among those of the instruction's stage on which it takes longest, the first of equals.
  const PlacedCostModel& slowest(const Plan& plan, const Instruction& instruction, int busy_cores) const;
  const PlacedCostModel& joining(std::span<const int> ranks) const;

  Machine machine_;
  std::vector<std::unique_ptr<PlacedCostModel>> kinds_;
  std::unique_ptr<PlacedCostModel> between_;
};

/// The machine whose links join the kinds of a mixed machine: as many nodes, with what every device has, of no kinds.
Machine between_kinds(const Machine& machine);

/// The cost model of a mixed machine. Refuses what `cost_model_for` refuses of a kind, or of the links between kinds.
Result<std::unique_ptr<PlacedCostModel>> mixed_costs(const Machine& machine, Precision precision);

}  // namespace shardlab::simulator
