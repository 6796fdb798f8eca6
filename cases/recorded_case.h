// The records in a case's folder: the plan that ran, and its traces joined with it. Nothing is lowered again.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cases/namespaces.h"
#include "cases/pipeline.h"
#include "plan/outcome.h"
#include "plan/program.h"
#include "plan/trace.h"

namespace shardlab::cases {

/// Plans of up to this many ranks leave their predicted trace on disk; larger ones would fill it.
inline constexpr int kTraceRanks = 64;

struct RecordedCase {
  std::unique_ptr<const Plan> plan;  ///< none: neither trace below is there
  std::vector<Program> programs;     ///< by role
  std::optional<Trace> predicted, measured;
  /// Failures to read or join, one sentence each that names the file: a plan.txt that is missing, damaged or changed after the run;
  /// a trace that is missing, cut off or of another plan; ops of a trace that the plan does not have.
  std::vector<std::string> problems;
};

/// `kept` is which traces the run kept (`RunMetadata::traces`): one that was not kept is not missed.
RecordedCase read_recorded(const CaseFiles& files, const CaseOutcome& outcome, const std::string& kept);

/// The problems of `read_recorded` that the beginnings of the files show: not whether a trace is cut off or damaged further on.
std::vector<std::string> recorded_problems(const CaseFiles& files, const CaseOutcome& outcome, const std::string& kept);

/// The plan in a case's folder, verified. None: there is no plan.txt, or it is no plan that could have run, which `recorded_problems` tells
/// where a trace lies beside it.
std::optional<Plan> recorded_plan(const CaseFiles& files);

}  // namespace shardlab::cases
