// From a case to a verified plan: build the step, then every strategy of the case, in the catalogue's order.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "plan/base/result.h"
#include "plan/case.h"
#include "plan/plan.h"

namespace shardlab::strategies {

struct LowerOptions {
  std::string_view after;  ///< leave out the techniques that follow this one (`shardlab plan --after`); empty for all
  bool verify = true;      ///< prove the plan before it is returned
  bool budget = false;     ///< refuse a plan whose peak exceeds the machine's memory per rank
};

/// The plan of one optimizer step. Refuses what `check(Case)` refuses, and a plan that does not verify.
Result<Plan> lower(const Case& config, const LowerOptions& options = {});

/// The plan of a step that is made again. With post_validation, of one step in which all stages meet before they update; with expert_bound, of
/// the second run, one sequence at a time. It keeps the same state under the same names. Refuses what `lower` refuses.
Result<Plan> lower_in_step(const Case& config);

/// The plan of the validation step of the same layout: one forward pass over `grad_accumulation` micro-batches, with losses only.
/// Its parameter buffers have the names and types of the training plan's parameter buffers.
Result<Plan> lower_validation(const Case& config, const LowerOptions& options = {});

}  // namespace shardlab::strategies
