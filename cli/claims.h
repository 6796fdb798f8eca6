// Verdicts on the claims of a sweep.
#pragma once

#include <span>
#include <vector>

#include "cli/namespaces.h"
#include "plan/outcome.h"
#include "reports/summary.h"

namespace shardlab::cli {

/// One statement a claim, in order: whether it holds over these outcomes, with the figures that its check compares; undecided where
/// a figure is not there, with the reason. A verdict that hangs on predicted or measured figures less than 0.5 % apart says that it
/// is without margin; one that does not hold gives the claim's `why`.
///
/// A figure is CASE.COLUMN (any column of results.csv) or CASE.WHAT_bytes, bytes of a rank's predicted peak by what they are for: a
/// buffer class (parameter_bytes, gradient_bytes, master_bytes, moment_bytes, activation_bytes, ...) or states_bytes, the sum of
/// those four.
std::vector<Statement> verdicts(const std::vector<Claim>& claims, std::span<const CaseOutcome> cases);

}  // namespace shardlab::cli
