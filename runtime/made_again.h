// Steps that a plan says must not stand, and those made again in their place.
//
// Two plans judge their steps. Post-validation takes the steps of a period back where one was to be clipped or given up
// (strategies/post_validation.cpp); they are made again in a session of its own, which takes the state over and gives it back. A bound on rows of
// experts leaves the update out where more rows came than there is room for (strategies/expert_bound.cpp); the step is made again in a session
// that lies in the same arenas, and nothing is copied.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "runtime/phases.h"
#include "runtime/session.h"

namespace shardlab::runtime {

/// The session of the plan by which steps are made again (`lower_in_step`). Made when it is first asked for.
using InStep = std::function<Result<Session*>()>;

/// The results of one period.
struct JudgedPeriod {
  StepResult first;               ///< of the period's plan
  std::vector<StepResult> again;  ///< where that must not stand: by step, of the steps that count

  std::span<const StepResult> counted() const { return again.empty() ? std::span(&first, 1) : std::span(again); }
  /// What does not stand took its time too.
  double seconds() const {
    double sum = first.seconds;
    for (const StepResult& step : again) sum += step.seconds;
    return sum;
  }
};

/// Runs the period that begins with step `step`. Where its plan says that it must not stand, its steps are made again in the session of `in_step`.
/// Refuses what `in_step` refuses, and plans that keep other state. `stop` is asked after each of these steps, and may throw.
Result<JudgedPeriod> run_judged(Session& session, int64_t step, const InStep& in_step,
                                const std::function<void(const StepResult&, int64_t)>& stop = {});

}  // namespace shardlab::runtime
