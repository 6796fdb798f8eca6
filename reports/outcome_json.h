// Outcomes, machines and run metadata as JSON, both ways: what the store keeps.
#pragma once

#include <string>
#include <string_view>

#include "plan/base/result.h"
#include "plan/outcome.h"
#include "reports/metadata.h"

namespace shardlab::reports {

/// Everything but the losses, the ops and the machine, which the store keeps in tables of their own.
std::string outcome_to_json(const CaseOutcome& outcome);
/// The same over what is in `text`, whose storage it takes.
void outcome_to_json(const CaseOutcome& outcome, std::string& text);
/// A machine with its calibration.
std::string machine_to_json(const Machine& machine);
std::string run_to_json(const RunMetadata& run);

/// The inverse: numbers come back bit for bit. Unknown keys are ignored, missing ones keep their defaults, so that older
/// stores can be read. Refuses what is no JSON object or has a value of a wrong kind.
Result<CaseOutcome> outcome_from_json(std::string_view text);
Result<Machine> machine_from_json(std::string_view text);
Result<RunMetadata> run_from_json(std::string_view text);

}  // namespace shardlab::reports
