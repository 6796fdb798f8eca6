// A case by its plan: memory and wire bytes as folds, and seconds by segments.
//
// A plan is as long as its micro-batches are many, and once the pipeline is full each does what the one before did. A case of many
// micro-batches is therefore read from two plans: one of a few, and one of a micro-batch more. What each adds is the difference of
// the two.
//
//   const auto plan = CasePlan::of(config, lower);       // `lower` is injected: strategies are not known here
//   plan->stages()[0][size_t(Space::kDevice)].peak_bytes;
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "plan/base/result.h"
#include "plan/case.h"
#include "plan/memory.h"
#include "plan/outcome.h"
#include "plan/plan.h"
#include "plan/routing.h"
#include "simulator/interpreter/cost_model.h"

namespace shardlab::simulator {

/// Lowers a case, unverified. Refuses what `check(Case)` refuses.
using Lower = std::function<Result<Plan>(const Case&)>;

/// Tensors of one name and class that are live at a peak.
struct HeldTensor {
  BufferClass cls = BufferClass::kActivation;
  std::string name;  ///< of the slot, without layer and micro-batch: "qkv", "attn.norm.y", "x"
  bool of_layer = false;
  int64_t bytes = 0;  ///< aligned
};

/// The buffers that are live on the device at the first moment of a stage's peak, by class and name. Persistent buffers are one
/// entry a class, without a name. The bytes add up to the peak.
std::vector<HeldTensor> held_at_peak(const Plan& plan, int stage);

class CasePlan {
 public:
  /// Lowers the case, or two cases of fewer micro-batches that stand for it. Of steps that may run again (expert_bound) the second run is lowered
  /// too: peaks are those of the run that needs more, wire bytes and seconds those of the first.
  ///
  /// Formula: where the steady phase of the schedule does the same again after r micro-batches (p of an interleaved pipeline, 2 of a
  ///   mirrored one, else 1), the plans are of m1 and of m1 + r micro-batches, if that is fewer than m together. m1 is 4 and what
  ///   fills the pipeline: pp, or what its first stage holds if that is more; of interleaved stages and of those that tell two
  ///   gradients apart 3 pp, and what makes m - m1 a multiple of r. A figure f of the case is
  ///   f(m1) + (m - m1) / r (f(m1 + r) - f(m1)). Of other schedules and few micro-batches the case itself is lowered.
  /// Valid when: of every stage and space the two plans have the same peak, class by class, but for metrics, which live for the
  ///   whole step (a loss a micro-batch). Otherwise, and in canonical mode, whose gradients are a binary counter over
  ///   micro-batches, the case itself is lowered. tests/laws holds both to each other, to the byte.
  static Result<CasePlan> of(const Case& config, const Lower& lower);

  /// Peaks by stage and space. Units: bytes of one rank.
  const std::vector<std::array<MemoryPeak, kSpaces>>& stages() const { return stages_; }
  /// Bytes sent in one period of the plan, over all ranks, by communicator.
  const std::map<std::string, int64_t>& wire() const { return wire_; }
  int64_t wire_of_step() const;
  /// Memory and wire bytes of a step.
  Prediction bytes() const;

  /// `bytes` and the seconds of a step by segments (simulator/interpreter/segments) of the whole plan: stages of unequal length
  /// take longer to find their pace than to fill their buffers. The machine is not local; the plan passes `check_runnable`.
  /// Ops of experts' rows take as long as where the rows of a rank are those of the fullest by the case's `routing`, as expected
  /// (`expected_imbalance`); bytes are those of even routes.
  Prediction predict(const Case& config, const PlacedCostModel& costs, const Routing& routing = {}) const;

  /// The plan that was folded: of the case, or of fewer micro-batches.
  const Plan& plan() const { return plan_; }
  /// The plan that decides the stage's peak on the device: of the case, or of the second run of its steps.
  const Plan& plan_at_peak(int stage) const;
  bool shortened() const { return shortened_; }

 private:
  static Result<CasePlan> of_one_run(const Case& config, const Lower& lower);

  Plan plan_;
  std::shared_ptr<const CasePlan> second_;  ///< of the second run; none: no step runs again
  std::vector<bool> second_decides_;        ///< by stage, its peak on the device
  bool shortened_ = false;
  Lower lower_;
  std::vector<std::array<MemoryPeak, kSpaces>> stages_;
  std::map<std::string, int64_t> wire_;
};

}  // namespace shardlab::simulator
