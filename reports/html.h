// The report: one HTML file, complete in itself, that needs no network.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "plan/outcome.h"
#include "reports/metadata.h"
#include "reports/summary.h"
#include "reports/timeline.h"

namespace shardlab::reports {

struct Report {
  std::string title;
  RunMetadata metadata;  ///< of the last run
  std::vector<CaseOutcome> cases;
  std::array<int64_t, 5> left_out{};  ///< cases, by Status, that are not shown (`Selection`)
  std::vector<Timeline> timelines;    ///< none, or of some cases
  std::vector<Statement> verdicts;    ///< on the claims of the sweep: they come before everything else that is said
  std::vector<Statement> notes;       ///< on the files that the report was made from: what could not be read, what was not kept
};

/// The data of the report as JSON (no HTML escapes): {title, metadata, columns, cases, summary, statements, timelines}.
std::string report_json(const Report& report);

/// The whole page. Equal input gives equal bytes. Text from outside (names, reasons, commands) cannot leave its place.
std::string render_html(const Report& report);

/// The report as markdown: the answer, accuracy by world size, the table of cases.
std::string render_markdown(const Report& report);

}  // namespace shardlab::reports
