#include "plan/verify.h"

#include <algorithm>

#include "plan/verify_internal.h"

namespace shardlab {

std::string_view name_of(Rule rule) {
  switch (rule) {
    case Rule::kForm: return "form";
    case Rule::kTypes: return "types";
    case Rule::kValues: return "values";
    case Rule::kGradients: return "gradients";
    case Rule::kOrder: return "order";
    case Rule::kMessages: return "messages";
    case Rule::kMemory: return "memory";
  }
  return "?";
}

std::vector<Finding> find_faults(const Plan& plan, const VerifyOptions& options) {
  using namespace verifying;
  Report report(options.max_findings);
  check_form(plan, report);
  if (report.count() > 0) return report.take();  // the other rules follow ids that form has checked
  check_types(plan, report);
  check_values(plan, report);
  check_backward(plan, report);
  check_overflow(plan, report);
  check_messages(plan, report);
  if (options.budget && report.count() == 0) check_memory(plan, *options.budget, report);
  return report.take();
}

Result<void> verify(const Plan& plan, const VerifyOptions& options) {
  const std::vector<Finding> findings = find_faults(plan, options);
  if (findings.empty()) return {};
  const bool all_memory = std::ranges::all_of(findings, [](const Finding& f) { return f.rule == Rule::kMemory; });
  Error error;
  error.code = all_memory ? ExitCode::kNo : ExitCode::kBug;
  error.message =
      fmt::format("plan `{}` does not verify: {} finding{}", plan.name, findings.size(), findings.size() == 1 ? "" : "s");
  for (const Finding& f : findings) {
    error.message += fmt::format("\n  {}: ", name_of(f.rule));
    if (f.role >= 0) error.message += fmt::format("stage {}: ", f.role);
    if (!f.op.empty()) error.message += f.op + ": ";
    error.message += f.message;
  }
  error.hint = all_memory ? "use a smaller micro_batch, recompute: full, or more ranks along tp or pp"
                          : "this plan was not run; `shardlab plan --after PASS` shows which strategy made the op";
  return error;
}

}  // namespace shardlab
