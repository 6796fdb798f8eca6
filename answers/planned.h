// A case as a plan that is decided, proven and placed: what `run`, `memory` and `search` begin with.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "answers/namespaces.h"
#include "answers/surroundings.h"
#include "plan/base/result.h"
#include "plan/case.h"
#include "plan/outcome.h"
#include "plan/placed_plan.h"

namespace shardlab::answers {

/// Bytes of one rank in a space, if somebody stated them: device memory (`memory_per_rank`), or the rank's part of its node's
/// memory by the machine's constants "host.memory_bytes" and "nvme.capacity_bytes". 0: not known.
int64_t capacity_per_rank(const Case& config, Space space);

/// The plan of a case, which nobody has proven: for folds and predictions, not to be run. The case is decided but for
/// `expert_placement: balanced`, which follows a change of ep.
Result<Plan> lower_unverified(const Case& config);

/// The case with every open choice made, by the costs of the case's machine: `schedule: auto` becomes the schedule with the
/// shortest slots whose plan fits, `stage_layers: balanced` and `expert_placement: balanced` lists, recompute by budget a list by layer.
/// `stage_layers: measured` becomes a list by the trace of the run whose checkpoint is resumed, `expert_placement: measured` one by the rows
/// that this run counted; both refuse a run without them. Refuses a budget that no choice stays within, and an open choice on a machine whose
/// speed nobody knows.
Result<Case> decide(const Case& config, const Surroundings& around);

/// A plan that is ready to run or to predict. A run of two phases (`warm_up_steps`) has two plans: `warm_up`, and this one, which
/// gives the reported time and wire bytes. Memory is reported for the phase that needs more.
struct PlacedRun : PlacedPlan {
  std::unique_ptr<const PlacedPlan> warm_up;  ///< none: one plan for all steps
  /// The plan by which steps are made again. With post_validation, of one step in which all stages meet, in arenas of its own; with expert_bound,
  /// of the second run, one sequence at a time, in the same arenas (`share_arenas`).
  std::unique_ptr<const PlacedPlan> in_step;
  bool shares_arenas = false;  ///< with `in_step`: each arena, and the peak, is that of the plan that needs more

  /// Plans that take turns in the arenas of this one, itself first: memory is reported for the one that needs more.
  std::vector<const PlacedPlan*> in_turn() const {
    std::vector<const PlacedPlan*> plans{this};
    for (const PlacedPlan* other : {static_cast<const PlacedPlan*>(warm_up.get()), shares_arenas ? in_step.get() : nullptr})
      if (other != nullptr) plans.push_back(other);
    return plans;
  }
};

/// Lowers and verifies a case, expands and places its programs. The case must be decided. The budget is not asked: see `fits`.
Result<PlacedRun> prepare(const Case& config);

/// Prepares the forward-only step that scores the validation split after training, in an arena beside the arena of training.
Result<PlacedPlan> prepare_validation(const Case& config);

/// Arena bytes of the rank that needs most of a space, in the phase that needs more.
int64_t largest_arena(const PlacedRun& placed, Space space = Space::kDevice);

/// What each stage of a mixed machine needs of its own device; nothing of any other machine.
std::vector<StageNeed> stage_memory(const Case& config, const PlacedRun& placed);

/// Refuses with ExitCode::kNo when the largest arena of a space, or the arenas of training and validation where the validation step
/// is given, exceed what a rank may use of it; on a mixed machine what a rank of some stage may use of its own device.
Result<void> fits(const Case& config, const PlacedRun& placed, const PlacedPlan* validation = nullptr);

}  // namespace shardlab::answers
