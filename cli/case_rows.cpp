#include "cli/case_rows.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <vector>

#include "cases/environment.h"
#include "cli/common.h"
#include "plan/reason_code.h"
#include "reports/columns.h"
#include "reports/format.h"
#include "reports/table.h"

namespace shardlab::cli {
namespace {

/// "... (sweep.yaml:12:7)" without what stands in the parentheses.
std::string_view without_place(std::string_view reason) {
  const size_t open = reason.rfind(" (");
  const bool place = open != std::string_view::npos && reason.ends_with(')') && reason.find(".y", open) != std::string_view::npos;
  return place ? reason.substr(0, open) : reason;
}

}  // namespace

void print_reasons(const Reasons& reasons) {
  if (reasons.empty()) return;
  Table table{{{"cases", Unit::kNone, "refused"},
               {.name = "reason", .heading = "because", .wraps = true},
               {.name = "example", .heading = "for example", .wraps = true}},
              {}};
  for (const Reason& r : reasons.list()) table.rows.push_back({r.cases, r.text, r.example});
  print(table, TableFormat::kTable);
  std::set<std::string_view> codes;
  for (const Reason& r : reasons.list())
    if (const std::string_view code = code_in(r.text); !code.empty()) codes.insert(code);
  for (const std::string_view code : codes) fmt::print("more: shardlab explain {}\n", code);
}

void count_refused(const CaseOutcome& outcome, Reasons& reasons) {
  if (outcome.status == Status::kRefused) reasons.add(without_place(outcome.reason), outcome.config.name);
}

void print_rows(std::span<const CaseOutcome> cases) {
  if (cases.empty()) return;
  std::vector<std::string_view> columns(summary_columns().begin(), summary_columns().end());
  const bool mixed = mixes_predictions(cases);
  if (mixed) columns.insert(std::ranges::find(columns, "predicted_step_s") + 1, "predicted_by");
  print(without_empty_columns(case_table(cases, columns)), TableFormat::kTable);
  if (mixed)
    fmt::print("{}\n",
               wrapped("predicted by analytic: an estimate without a plan, which chose the points that were then predicted by "
                       "their plans; the two do not compare to a few percent",
                       terminal_width(), 2));
  if (std::ranges::any_of(cases, [](const CaseOutcome& o) { return step_error_pct(o).has_value(); }))
    fmt::print("error: the predicted step over the measured one, minus 1\n");
}

void print_statements(std::span<const Statement> statements) {
  for (const Statement& s : statements) fmt::print("{}\n", wrapped(s.text, terminal_width(), 2));
}

void print_cases(std::span<const CaseOutcome> cases) {
  std::vector<CaseOutcome> rows;
  std::ranges::copy_if(cases, std::back_inserter(rows), [](const CaseOutcome& o) { return o.status != Status::kRefused; });
  Reasons refused;
  for (const CaseOutcome& outcome : cases) count_refused(outcome, refused);
  print_rows(rows);
  if (!rows.empty() && !refused.empty()) fmt::print("\n");
  print_reasons(refused);
}

}  // namespace shardlab::cli
