// The prices of another cost model, times a factor by op.
#pragma once

#include <span>

#include "simulator/interpreter/cost_model.h"

namespace shardlab::simulator {

/// The demand of what keeps each resource busy `times` as long.
Demand scaled(Demand demand, double times);

/// A cost model that has another's prices, times `factor_of` the op: seconds, and demands with them, so that what an op asks of a device while
/// it runs stays. What an op waits for, and what it shares with others, follows from the simulation. An op of factor 0 takes no time and
/// asks for nothing.
class ScaledCostModel : public PlacedCostModel {
 public:
  /// `base` must outlive this.
  explicit ScaledCostModel(const PlacedCostModel& base) : base_(base) {}

  Seconds compute(const Plan& plan, const Instruction& instruction, int busy_cores) const final;
  Seconds communicate(const Plan& plan, const Instruction& instruction, int busy_cores) const final;
  Seconds communicate_among(const Plan& plan, const Instruction& instruction, std::span<const int> ranks,
                            int busy_cores) const final;
  Slowest slowest_of(const Plan& plan, const Instruction& instruction, const Communication& communication) const final;
  Demand demand(const Plan& plan, const Instruction& instruction, std::span<const int> ranks, Seconds alone) const final;
  Seconds dispatch() const override { return base_.dispatch(); }
  Seconds wake() const override { return base_.wake(); }
  Seconds handover() const override { return base_.handover(); }
  Seconds turn() const override { return base_.turn(); }
  double unsteadiness() const override { return base_.unsteadiness(); }
  bool differs_by_stage() const override { return base_.differs_by_stage(); }
  bool extrapolates(const Plan& plan, const Instruction& instruction) const override {
    return base_.extrapolates(plan, instruction);
  }

 protected:
  virtual double factor_of(const Instruction& instruction) const = 0;
  const PlacedCostModel& base() const { return base_; }

 private:
  const PlacedCostModel& base_;
};

}  // namespace shardlab::simulator
