// Seconds of one instruction on its own: from calibration, from a data sheet, or from a fixed table.
#pragma once

#include <limits>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "plan/base/result.h"
#include "plan/case.h"
#include "plan/interfaces.h"
#include "plan/machine.h"
#include "simulator/interpreter/datasheet_rates.h"
#include "simulator/interpreter/rate_table.h"
#include "simulator/interpreter/resources.h"

namespace shardlab::simulator {

/// The facts about a communication that do not depend on the machine's speed.
struct Communication {
  std::vector<std::vector<int>> groups;  ///< who meets, once for each meeting that the asking rank stands for (`who_meet`)
  double sent_bytes = 0;                 ///< by the first rank of a group: the message, or what a collective's algorithm sends
  double steps = 1;                      ///< of the algorithm
  StepsTaken turn;                       ///< of a tree and a hierarchical collective
};
/// All groups have one size. Those of one rank send nothing.
Communication communication_of(const Plan& plan, const Instruction& instruction, std::vector<std::vector<int>> groups);

/// A cost model that also knows where ranks lie: what the timeline asks.
class PlacedCostModel : public CostModel {
 public:
  /// Seconds of a collective or message among `ranks`, once they are all there: of a message its sender and its receiver, of a
  /// collective its group, in group order. Where a model cannot tell ranks apart this is `communicate`.
  virtual Seconds communicate_among(const Plan& plan, const Instruction& instruction, std::span<const int> ranks,
                                    int busy_cores) const;
  struct Slowest {
    std::span<const int> ranks;  ///< who meets; nobody where it takes no time
    Seconds seconds;
    Demand demand;  ///< of what takes any time
  };
  /// The group of a communication that takes longest, the first of equals, alone on the machine.
  virtual Slowest slowest_of(const Plan& plan, const Instruction& instruction, const Communication& communication) const;
  /// Core time, on a local machine, of a member's part in one step of a collective or message (plan/collective_steps.h): what the
  /// whole takes where each of `ranks` has a core, over its steps.
  Seconds step_among(const Plan& plan, const Instruction& instruction, std::span<const int> ranks) const;
  /// On a local machine: seconds for a stream to take over a core from another stream, and the seconds for which a stream keeps a
  /// core that another one wants, not counting the op in progress (runtime/core_scheduler.h).
  virtual Seconds handover() const { return Seconds(0); }
  virtual Seconds turn() const { return Seconds(0); }
  /// Of the cores of a local machine, `Calibration::unsteadiness`. Ranks that wait for one another wait for the slowest.
  virtual double unsteadiness() const { return 0; }
  /// The demand of an instruction on its rank's device, if it takes `alone` seconds alone; `ranks` as above, for communication. A
  /// model that knows no work demands all of the op's main resource for all of its time: the multiprocessors; for a message the
  /// link out of its sender and into its receiver, for a collective both, for a copy between memories a copy engine.
  virtual Demand demand(const Plan& plan, const Instruction& instruction, std::span<const int> ranks, Seconds alone) const;
  /// Whether the same compute costs differently from stage to stage: `Instruction::role` is then asked for.
  virtual bool differs_by_stage() const { return false; }
};

/// The name under which an op's cost is measured and looked up: kind, phase and whatever changes its inner loop.
/// "linear.F.bias", "norm.I.rms", "activation.F.swiglu", "cross_entropy.fused", "all_reduce.ring", "p2p" (send and receive alike).
std::string kernel_of(const Op& op);
/// The name of the op's kernel; with ".grouped" where query heads share heads of keys, with ".convert" where a copy changes the type, and with the
/// element type where an operand is a narrower float than fp32: "linear.F.bf16", "attention.I.grouped.bf16", "all_reduce.ring.bf16".
std::string kernel_of(const Segment& segment, const Op& op);
/// What follows the name of a GPU's kernel of fixed order where the library's, or another of its own, serves when order is free.
inline constexpr std::string_view kCanonicalKernel = ".canonical";

/// The extents that determine the cost of `op` on one rank, in the order of `RatePoint::shape`:
///   linear [m, n, k] as `matmul_extents`; grouped_linear [experts, expected rows of one, out, in]; attention [b, heads, s, d], of a block with the s whose
///   causal pairs are as many; norm, head_norm, rope, latent_heads, activation (of experts: expected rows), residual, dropout, embed,
///   positions, regroup and gate [rows, width of one row]; route [tokens, experts]; cross_entropy [elements / logical vocabulary, logical vocabulary]; collectives [bytes of
///   the full buffer, ranks]; p2p and every other op [bytes read and written].
std::vector<int64_t> cost_shape_of(const Plan& plan, const Segment& segment, const Op& op);

/// Does the op move data to or from a drive?
bool uses_drive(const Segment& segment, const Op& op);

/// Costs from the measured points of a calibrated machine.
///
/// Formula: log seconds is multilinear in the logs of the shape's extents over the grid of measured points, at concurrency 1 and at
///   all cores, and linear in the number of busy cores between the two. An attention's b * heads is one extent. Outside the grid
///   the outermost cell's slope goes on. A collective among more ranks than were measured costs, step by step, what moves as much
///   in a step of the largest group that was. One measured among ranks that outnumber the cores is returned as core time: the
///   measured time times cores / ranks. An op without points costs the greater of its flops at the machine's measured peak and its
///   bytes at the measured memory bandwidth. Copies between device and host memory are copies like others, since both are this
///   machine's memory; transfers to drives cost what `DatasheetCostModel` says, by the constants of the machine's file or their
///   defaults, and count as extrapolated.
/// Units: seconds.
/// Source: Machine::calibration (simulator/interpreter/calibrate).
/// Valid when: the ranks run on this machine with the kernels that were measured (Calibration::kernel_variant), one thread a rank.
class CalibratedCostModel final : public PlacedCostModel {
 public:
  /// `machine.calibration` must be there. `canonical`: ops are done by kernels of fixed order, where such were measured.
  explicit CalibratedCostModel(const Machine& machine, bool canonical = false);

  Seconds compute(const Plan& plan, const Instruction& instruction, int busy_cores) const override;
  Seconds communicate(const Plan& plan, const Instruction& instruction, int busy_cores) const override;
  Seconds dispatch() const override { return Seconds(calibration_->op_overhead_s); }
  Seconds wake() const override { return Seconds(calibration_->wake_latency_s); }
  Seconds handover() const override { return Seconds(calibration_->handover_s); }
  Seconds turn() const override { return Seconds(calibration_->turn_s); }
  double unsteadiness() const override { return calibration_->unsteadiness; }
  /// On a GPU an op keeps units and memory busy for its flops and bytes at the rates measured: small ops run side by side.
  Demand demand(const Plan& plan, const Instruction& instruction, std::span<const int> ranks, Seconds alone) const override;
  bool extrapolates(const Plan& plan, const Instruction& instruction) const override;
  /// Whether a measured kernel prices the op: its own, or one that does as much. Others are priced by flops and bytes alone.
  bool measured(const Instruction& instruction) const { return nearest(instruction).levels != nullptr; }

  const std::string& calibration_id() const { return calibration_->id; }

 private:
  /// Measured points of one kernel, one table a concurrency, fewest ranks first.
  using Levels = std::map<int, RateTable>;
  RateTable::Answer at(const std::string& kernel, const Levels& levels, const std::vector<int64_t>& shape, int busy_cores) const;
  RateTable::Answer cost_of(const Plan& plan, const Instruction& instruction, int busy_cores) const;
  double to_largest_group(const Collective& c, const std::string& kernel, std::vector<int64_t>& shape) const;

  struct Nearest {
    const std::string* kernel = nullptr;  ///< its name
    const Levels* levels = nullptr;
    bool same_work = false;  ///< of the op's element type and with its bias
  };
  Nearest nearest(const Instruction& instruction) const;

  std::shared_ptr<const Calibration> calibration_;
  bool canonical_ = false;
  Device device_;  ///< its constants and peaks
  int cores_ = 1;
  double peak_flops_ = 0;
  double memory_bytes_per_s_ = 0;
  std::map<std::string, Levels> kernels_;
  struct Groups {
    int largest = 0;
    int64_t least_bytes = std::numeric_limits<int64_t>::max();
  };
  std::map<std::string, Groups> groups_;  ///< of several ranks that were measured, by kernel
};

/// Costs of a machine that nobody calibrated, from its data sheet.
///
/// Formula: compute = max(flops / (peak * matmul * flops / (flops + ramp)), memory bytes / (bandwidth * memory)), where the ramp
///   applies to Linear and Attention only. Collectives: the sum over the steps of the algorithm (plan/collective_steps.h) of
///   latency + bytes sent in the step / bandwidth; the bandwidth is the link's within a node, else the least of the link's and of
///   the members on the node with the fewest times the network's (parallel rings); of others each step at its own (own_collectives.h). p2p:
///   latency + bytes / bandwidth between the two ranks. `communicate` takes the group, or the slowest hop, that rank 0 belongs to.
///   A copy between memories takes what DeviceModel says, and so does an op on host memory: its bytes pass at the copy engine's
///   rate, which is taken to be a device's share of host memory; files are read and written by all devices of a node at once.
///   Demands are work over the same rates: flops of the
///   multiprocessors, bytes of memory, bytes sent of link and network; a collective moves Fabric's `memory_traffic` bytes of memory
///   for each byte sent, and holds the multiprocessors of `Fabric::contention`. A message holds none.
/// Units: seconds.
/// Source: Machine::device and Machine::inter_bytes_per_s (data sheets); `Efficiency` for what of them is reached.
/// Valid when: each rank has a device of its own; never better than a factor, and so always reported as extrapolated.
class DatasheetCostModel final : public PlacedCostModel {
 public:
  /// The machine must be one that `cost_model_for` does not refuse. `precision` says which peak is used; a machine
  /// without it has its largest slower one.
  DatasheetCostModel(const Machine& machine, Precision precision, const Efficiency& efficiency = {});

  Seconds compute(const Plan& plan, const Instruction& instruction, int busy_cores) const override;
  Seconds communicate(const Plan& plan, const Instruction& instruction, int busy_cores) const override;
  Seconds communicate_among(const Plan& plan, const Instruction& instruction, std::span<const int> ranks,
                            int busy_cores) const override;
  Slowest slowest_of(const Plan& plan, const Instruction& instruction, const Communication& communication) const override;
  Demand demand(const Plan& plan, const Instruction& instruction, std::span<const int> ranks, Seconds alone) const override;
  Seconds dispatch() const override { return Seconds(rates_.efficiency().launch_s); }
  Seconds wake() const override { return Seconds(rates_.efficiency().wake_s); }
  bool extrapolates(const Plan&, const Instruction&) const override { return true; }

 private:
  DatasheetRates rates_;
};

/// Costs stated outright, for tests and for exercises on paper: the seconds of each op by its label.
///
/// Formula: seconds[label], or `otherwise`. With `contention` c an op takes 1 + c * (busy cores - 1) times as long.
/// Units: seconds. Source: the caller. Valid when: always.
class FixedCostModel final : public PlacedCostModel {
 public:
  std::map<std::string, double> seconds;
  double otherwise = 1;
  double dispatch_s = 0;
  double wake_s = 0;
  double handover_s = 0;
  double turn_s = 0;
  double contention = 0;
  double unsteady = 0;

  Seconds compute(const Plan& plan, const Instruction& instruction, int busy_cores) const override;
  Seconds communicate(const Plan& plan, const Instruction& instruction, int busy_cores) const override;
  Seconds dispatch() const override { return Seconds(dispatch_s); }
  Seconds wake() const override { return Seconds(wake_s); }
  Seconds handover() const override { return Seconds(handover_s); }
  Seconds turn() const override { return Seconds(turn_s); }
  double unsteadiness() const override { return unsteady; }
};

/// The best model that `machine` supports: by its kinds if it is mixed (mixed_costs.h), calibrated if it carries a calibration, else of its
/// data sheet. Refuses a local machine without calibration, a device without peak or bandwidth, and constants that DeviceModel or Fabric
/// refuse.
Result<std::unique_ptr<PlacedCostModel>> cost_model_for(const Machine& machine, Precision precision, bool canonical = false);
/// For the machine, precision and order of a case.
Result<std::unique_ptr<PlacedCostModel>> cost_model_for(const Case& config);

}  // namespace shardlab::simulator
