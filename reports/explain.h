// Why a case is as fast as it is: the text of `shardlab explain`.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "plan/outcome.h"
#include "plan/priced_collective.h"
#include "reports/table.h"

namespace shardlab::reports {

/// One row per op label and stage, the greatest time first: stage, op, kind, count, flops, bytes, payload, predicted_s, measured_s,
/// residual_s (measured - predicted), residual_pct (of predicted), share (of the time of all ops of all stages), flops_per_s
/// (measured, else predicted). `rows` 0 gives all.
Table op_table(const CaseOutcome& outcome, int rows = 0);

/// A part of the step of the slowest rank.
struct StepPart {
  enum Kind : uint8_t { kCompute, kCommunication, kCopies, kBubble, kIdle };
  std::string_view name;
  double seconds = 0;
  int tenths = 0;  ///< of a percent of the step
};

/// The parts of a step's time, measured if it was measured: one part a kind. Parts do not overlap, and their tenths of a percent
/// add up to 1000. Waits for a peer or for another stage count as idle. Only the analytic estimate, which does not know idle time
/// by cause, has a part for the bubble. Empty if nothing is known of a step.
std::vector<StepPart> step_parts(const CaseOutcome& outcome);

/// Sentences: where the step's time goes (compute, exposed communication, bubble, unplanned), which op kinds lose most against the
/// prediction, what takes memory that no plan has (on devices), whether ranks share cores, whether the prediction extrapolates, and
/// what to try. Never empty.
std::vector<std::string> reasons(const CaseOutcome& outcome);

/// Where the algorithm of a collective comes from, in words: "least predicted time", "asked for", "rule by kind and ranks",
/// "canonical order", "its strategy needs it".
std::string_view origin_of(const PricedCollective& collective, const Case& config);

/// Sentences: the algorithm of each collective, and what the others are predicted to take. At most `most` of them, and one that counts the
/// rest. Empty where a step has no collective.
std::vector<std::string> collective_reasons(std::span<const PricedCollective> collectives, const Case& config, size_t most = 8);

struct ExplainOptions {
  int rows = 20;                                       ///< of the op table, 0 for all
  int width = 0;                                       ///< of the terminal, 0 for no limit
  std::span<const PricedCollective> collectives = {};  ///< of the case's plan
};

/// Heading, op table and reasons, as text for a person.
std::string explain(const CaseOutcome& outcome, const ExplainOptions& options = {});

}  // namespace shardlab::reports
