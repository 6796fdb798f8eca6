// Golden plans as files of tests/golden/plans: some are whole (NAME.plan), the others say how they differ from the nearest one
// (NAME.diff), so that a reviewer sees the technique and not the step around it.
//
// A difference begins with a line "as BASE, but for" and goes on as a unified diff without line numbers: "@@ segment update4" begins
// a hunk of that segment or role. A hunk belongs to the first place behind the hunk before it that has its lines, and has as many
// lines of context as it takes for that place to be the right one.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace shardlab::testing {

/// How `text` differs from `base`, as above without the first line; empty where it does not. Both end with a line break.
std::string text_difference(std::string_view base, std::string_view text);
/// The text that differs from `base` so. Empty where the difference is of another base.
std::string with_difference(std::string_view base, std::string_view difference);

/// Names of all golden plans, in order.
std::vector<std::string> golden_plan_names();
/// The text of a golden plan, whole or put together; empty where there is none.
std::string golden_plan(const std::string& name);

struct NamedText {
  std::string name, text;
};
/// Compares the texts of all golden plans with their files, as `golden_difference` does, and gives what differs. Where files are
/// rewritten a plan is told from the one before it in `texts` that it differs least from, unless it is among `whole` or the difference
/// is nearly as long as the plan; files of no name in `texts` are removed.
std::string golden_plans_difference(const std::vector<NamedText>& texts, const std::vector<std::string>& whole);

}  // namespace shardlab::testing
