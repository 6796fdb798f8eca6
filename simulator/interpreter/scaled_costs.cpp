#include "simulator/interpreter/scaled_costs.h"

namespace shardlab::simulator {

Demand scaled(Demand demand, double times) {
  for (double& busy : demand.busy_s) busy *= times;
  return demand;
}

Seconds ScaledCostModel::compute(const Plan& plan, const Instruction& instruction, int busy_cores) const {
  return Seconds(base_.compute(plan, instruction, busy_cores).value * factor_of(instruction));
}

Seconds ScaledCostModel::communicate(const Plan& plan, const Instruction& instruction, int busy_cores) const {
  return Seconds(base_.communicate(plan, instruction, busy_cores).value * factor_of(instruction));
}

Seconds ScaledCostModel::communicate_among(const Plan& plan, const Instruction& instruction, std::span<const int> ranks,
                                           int busy_cores) const {
  return Seconds(base_.communicate_among(plan, instruction, ranks, busy_cores).value * factor_of(instruction));
}

PlacedCostModel::Slowest ScaledCostModel::slowest_of(const Plan& plan, const Instruction& instruction,
                                                     const Communication& communication) const {
  const double factor = factor_of(instruction);
  if (factor == 0) return {};
  Slowest slowest = base_.slowest_of(plan, instruction, communication);
  slowest.seconds = Seconds(slowest.seconds.value * factor);
  slowest.demand = scaled(slowest.demand, factor);
  return slowest;
}

Demand ScaledCostModel::demand(const Plan& plan, const Instruction& instruction, std::span<const int> ranks, Seconds alone) const {
  const double factor = factor_of(instruction);
  if (factor == 0) return {};
  return scaled(base_.demand(plan, instruction, ranks, Seconds(alone.value / factor)), factor);
}

}  // namespace shardlab::simulator
