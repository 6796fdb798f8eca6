// The text form of plans: printed, read by people, compared as golden files, and parsed back.
#pragma once

#include <string>
#include <string_view>

#include "plan/base/result.h"
#include "plan/plan.h"

namespace shardlab {

/// The whole plan. parse_plan(print(p)) prints the same text.
std::string print(const Plan& plan);

/// One segment, as it stands in the plan's text.
std::string print(const Plan& plan, const Segment& segment);

/// "f32[8,128,256] dp:S0 tp:P", the text of a type.
std::string print(const Type& type, const Mesh& mesh);

/// "all_reduce tp.out (%z) -> (%z.sum)": the text of an op.
std::string print(const Plan& plan, const Segment& segment, const Op& op);

/// Whether `text` is a plan's: its first line that is neither empty nor a comment names the language.
bool is_plan_text(std::string_view text);

/// Reads a plan back. Errors name line and column, what was expected, and what was found.
Result<Plan> parse_plan(std::string_view text, std::string_view file = "plan");

}  // namespace shardlab
