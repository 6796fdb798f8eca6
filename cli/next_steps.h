// What to try next: the layouts beside the best one, each predicted.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cli/namespaces.h"
#include "plan/outcome.h"
#include "sweeps/sweep.h"

namespace shardlab::cli {

/// A case of a store as the point of a sweep, to be predicted again. None where the case does not hold its model.
std::optional<sweeps::Point> point_of(const CaseOutcome& outcome);

/// Sentences about the neighbours of `best`: layouts that differ from it in one decision, on as many ranks and with as many tokens a
/// step, which are not among `cases`. Both are predicted at the analytic resolution, so that a gain is one of like with like. Says
/// which are faster and by how much, or that none is. Empty where the case cannot be estimated.
std::vector<std::string> next_steps(const CaseOutcome& best, std::span<const CaseOutcome> cases);

}  // namespace shardlab::cli
