// Verdicts on the claims of a sweep.
#pragma once

#include <span>
#include <vector>

#include "cli/namespaces.h"
#include "plan/outcome.h"
#include "reports/summary.h"

namespace shardlab::cli {

/// One statement a claim, in order: whether the claim holds over these outcomes, with the figures that its check compares. A claim
/// is undecided if a figure is missing; the statement gives the reason. A verdict that depends on predicted or measured figures
/// less than 0.5 % apart says that it is without margin. A claim that does not hold gives its `why`.
///
/// A figure is CASE.COLUMN (any column of results.csv) or CASE.WHAT_bytes: bytes of a rank's predicted peak by class. WHAT is a
/// buffer class (parameter_bytes, gradient_bytes, master_bytes, moment_bytes, activation_bytes, ...); states_bytes is the sum of
/// the first four.
std::vector<Statement> verdicts(const std::vector<Claim>& claims, std::span<const CaseOutcome> cases);

}  // namespace shardlab::cli
