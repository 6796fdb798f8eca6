// Periods whose steps a plan may take back (strategies/post_validation.cpp), and the steps made again in their place.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "runtime/phases.h"
#include "runtime/session.h"

namespace shardlab::runtime {

/// The session of the plan of one step in which all stages meet, of the same run. Made when it is first asked for.
using InStep = std::function<Result<Session*>()>;

/// The results of one period.
struct ValidatedPeriod {
  StepResult first;               ///< of the period's plan
  std::vector<StepResult> again;  ///< where that was rolled back: by step, of the steps that count

  std::span<const StepResult> counted() const { return again.empty() ? std::span(&first, 1) : std::span(again); }
  /// What was taken back took its time too.
  double seconds() const {
    double sum = first.seconds;
    for (const StepResult& step : again) sum += step.seconds;
    return sum;
  }
};

/// Runs the period that begins with step `step`. Where its plan took it back, its steps are made again in the session of `in_step`, which takes
/// the state over and gives it back. Refuses what `in_step` refuses, and plans that keep other state. `stop` is asked after each of
/// these steps, and may throw.
Result<ValidatedPeriod> run_validated(Session& session, int64_t step, const InStep& in_step,
                                      const std::function<void(const StepResult&, int64_t)>& stop = {});

}  // namespace shardlab::runtime
