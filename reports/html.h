// The report: one HTML file, complete in itself, that needs no network.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "plan/outcome.h"
#include "plan/priced_collective.h"
#include "reports/compare.h"
#include "reports/metadata.h"
#include "reports/summary.h"
#include "reports/table.h"
#include "reports/timeline.h"

namespace shardlab::reports {

/// A figure of every case that results.csv does not have, or another source of one that it has.
struct ExtraColumn {
  std::string name;
  Unit unit = Unit::kNone;
  std::string heading, help;
  std::vector<Value> values;  ///< by case
  bool is_setting = false;    ///< the figure says what a case is, not what came of it
};

/// A figure of two cases of a comparison.
struct ChangedFigure {
  size_t a = 0, b = 0;  ///< the cases, as indices into Report::cases
  std::string metric;   ///< `Metric::name`
  Change change;
};

/// The memory of the ranks of one stage, at the peak.
struct StageMemory {
  int stage = 0;
  int ranks = 0;  ///< of the stage
  MemoryByClass at_peak;
  int64_t peak_bytes = 0;
  std::string moment;                     ///< what runs then
  std::optional<int64_t> measured_bytes;  ///< the highest of its ranks, as the ops ran
};

/// What a page has of some cases only.
struct CaseDetail {
  std::vector<StageMemory> stages;
  std::vector<PricedCollective> collectives;
  std::string yaml;  ///< the whole case
};

/// Layouts that a search passed over for one reason.
struct LostLayouts {
  int64_t layouts = 0;
  std::string says;
  std::string nearest;  ///< the one that came nearest, with its figures
};

struct Report {
  enum class Kind : uint8_t { kRun, kSearch, kComparison } kind = Kind::kRun;
  std::string title;
  RunMetadata metadata;  ///< of the last run
  std::vector<CaseOutcome> cases;
  std::array<int64_t, 5> left_out{};  ///< cases, by Status, that are not shown (`Selection`)
  std::vector<Timeline> timelines;    ///< none, or of some cases
  std::vector<Statement> verdicts;    ///< on the claims of the sweep: they come before everything else that is said
  std::vector<Statement> notes;       ///< on the files that the report was made from: what could not be read, what was not kept
  std::vector<std::string> next;      ///< what to try next, and what that is predicted to give: sentences
  std::vector<ExtraColumn> extra;
  std::map<std::string, CaseDetail> details;  ///< by case id
  std::vector<LostLayouts> lost;              ///< of a search, the commonest reason first
  std::vector<ChangedFigure> changes;         ///< of a comparison, whose `verdicts` are all that is said of its cases
  double price_usd = 0;                       ///< of a device-hour; 0: not known
  std::string price_note;
};

/// The data of the page as JSON (no HTML escapes): `page_data`.
std::string report_json(const Report& report);

/// The whole page. Equal input gives equal bytes. Text from outside (names, reasons, commands) cannot leave its place. A page with a
/// `revision` asks the server that it came from for `/state`, and loads itself again once the revision there is another.
std::string render_html(const Report& report, std::string_view revision = {});

/// The report as markdown: the answer, accuracy by world size, the table of cases.
std::string render_markdown(const Report& report);

}  // namespace shardlab::reports
