// From ideal compute to the step: what each further part of a step's time adds.
#pragma once

#include <string_view>
#include <vector>

#include "plan/outcome.h"

namespace shardlab::reports {

/// A part of the step of the slowest rank.
struct Bar {
  std::string_view name;  ///< one of `bar_names`
  double seconds = 0;
};

/// Every name, in the order of the picture: "ideal" and "kernels" are the two parts of "compute" where the device's peak is known;
/// the others are those of StepParts.
const std::vector<std::string_view>& bar_names();

/// The bars of a step, measured or predicted, without those of no length: they add up to the step. "ideal" is the time of the model's
/// flops (no recompute) at the peak of all devices, "kernels" what compute takes beyond it. A prediction that does not tell its parts
/// (resolution segments) has compute, communication, copies, the bubble, and all other waits as one. Empty where no step is known.
std::vector<Bar> waterfall(const CaseOutcome& outcome, bool measured);

}  // namespace shardlab::reports
