// The cases of a run as a terminal shows them: those with figures row by row, refused ones by their reasons.
#pragma once

#include <span>
#include <string_view>

#include "cli/namespaces.h"
#include "plan/outcome.h"
#include "plan/reasons.h"
#include "reports/summary.h"

namespace shardlab::cli {

/// One row a reason, however many cases have it. Nothing for none.
void print_reasons(const Reasons& reasons);

/// Counts a case that is refused, under its reason without the line of the sweep file, which differs from case to case.
void count_refused(const CaseOutcome& outcome, Reasons& reasons);

/// Rows of cases with figures; columns that are empty in all of them are left out.
void print_rows(std::span<const CaseOutcome> cases);

/// Both, of all cases.
void print_cases(std::span<const CaseOutcome> cases);

/// A sentence a line, broken where the terminal ends.
void print_statements(std::span<const Statement> statements);

}  // namespace shardlab::cli
