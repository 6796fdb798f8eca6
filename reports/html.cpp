#include "reports/html.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <set>
#include <span>

#include "reports/assets.h"
#include "reports/columns.h"
#include "reports/escape.h"
#include "reports/format.h"
#include "reports/pack.h"
#include "reports/page_data.h"
#include "reports/summary.h"

namespace shardlab::reports {

namespace {

/// Data of a page up to this size stay text that a person can read; longer data are packed.
constexpr size_t kPlainBytes = 64 << 10;
/// Rows of the page without scripts.
constexpr size_t kPlainRows = 200;

/// Columns of the page without scripts, and of the markdown report.
constexpr std::array<std::string_view, 10> kPlainColumns{"name",
                                                         "status",
                                                         "world_size",
                                                         "predicted_step_s",
                                                         "measured_step_s",
                                                         "step_error_pct",
                                                         "measured_tokens_per_s",
                                                         "predicted_peak_bytes",
                                                         "predicted_wire_bytes",
                                                         "reason"};

/// Columns of the markdown report's second table, shown if some case keeps state outside its device.
constexpr std::array<std::string_view, 9> kOutsideColumns{"name",
                                                          "predicted_exposed_comm_s",
                                                          "measured_exposed_comm_s",
                                                          "predicted_exposed_copy_s",
                                                          "measured_exposed_copy_s",
                                                          "predicted_host_bytes",
                                                          "measured_host_bytes",
                                                          "predicted_nvme_bytes",
                                                          "measured_nvme_bytes"};

bool is_outside(const CaseOutcome& o) {
  return (o.predicted && o.predicted->host_memory.total() + o.predicted->nvme_memory.total() > 0) ||
         (o.measured && o.measured->host_memory.total() + o.measured->nvme_memory.total() > 0);
}

/// A table of the markdown report, shown if devices' memory was told apart: a row a case, a column for each item.
Table unplanned_memory_table(const std::vector<CaseOutcome>& cases) {
  Table table;
  table.columns = {{"name"}, {"unplanned_memory_bytes", Unit::kBytes, "unplanned memory"}};
  std::vector<std::string> names;
  for (const CaseOutcome& o : cases)
    for (const MemoryItem& item : o.measured ? o.measured->unplanned_memory : std::vector<MemoryItem>())
      if (std::ranges::find(names, item.name) == names.end()) names.push_back(item.name);
  for (const std::string& name : names) table.columns.push_back({name, Unit::kBytes, name});
  for (const CaseOutcome& o : cases) {
    if (!o.measured || o.measured->unplanned_memory.empty()) continue;
    std::vector<Value> row{o.config.name, o.measured->unplanned_memory_bytes};
    for (const std::string& name : names) {
      const auto found = std::ranges::find(o.measured->unplanned_memory, name, &MemoryItem::name);
      row.push_back(found == o.measured->unplanned_memory.end() ? Value() : Value(found->bytes));
    }
    table.rows.push_back(std::move(row));
  }
  return table;
}

/// The verdicts on claims, then the answer, then what is to be known of the files.
std::vector<Statement> said_of(const Report& report, const Summary& summary) {
  std::vector<Statement> all = report.verdicts;
  if (report.kind != Report::Kind::kComparison)
    for (Statement& s : statements(report.cases, summary)) all.push_back(std::move(s));
  all.insert(all.end(), report.notes.begin(), report.notes.end());
  return all;
}

/// "2026-05-04 · Intel Xeon", or "2026-05-04 · NVIDIA H200, host Intel Xeon": of a run that measured, where; of any, when.
std::string subtitle_of(const Report& report) {
  std::set<std::string> gpus;
  bool measured = false;
  for (const CaseOutcome& o : report.cases) {
    if (!o.measured) continue;
    measured = true;
    if (o.config.backend == BackendKind::kCuda) gpus.insert(o.config.machine.device.id);
  }
  const std::string& host = report.metadata.processor;
  if (!measured || (host.empty() && gpus.empty())) return report.metadata.date;
  if (gpus.empty()) return report.metadata.date + " · " + host;
  return fmt::format("{} · {}{}{}", report.metadata.date, fmt::join(gpus, ", "), host.empty() ? "" : ", host ", host);
}

std::string statements_html(const std::vector<Statement>& all) {
  std::string out;
  for (const Statement& s : all) out += fmt::format("<li class=\"{}\">{}</li>\n", word_of(s.mood), html_escaped(s.text));
  return out;
}

/// The table for readers without scripts: of very many cases the first, and the best.
std::string plain_table_html(std::span<const CaseOutcome> cases, const Summary& summary) {
  Table table = case_table(cases.first(std::min(cases.size(), kPlainRows)), kPlainColumns);
  if (summary.fastest >= static_cast<int>(kPlainRows))
    table.rows.insert(table.rows.begin(),
                      case_table(cases.subspan(static_cast<size_t>(summary.fastest), 1), kPlainColumns).rows[0]);
  std::string out =
      cases.size() <= kPlainRows ? "" : fmt::format("<p>The fastest, and the first {} of {} cases.</p>", kPlainRows, cases.size());
  out += "<table><thead><tr>";
  for (const TableColumn& c : table.columns)
    out += fmt::format("<th scope=\"col\">{}</th>", html_escaped(c.heading.empty() ? c.name : c.heading));
  out += "</tr></thead><tbody>\n";
  for (const auto& row : table.rows) {
    out += "<tr>";
    for (size_t c = 0; c < row.size(); ++c)
      out += fmt::format("<td>{}</td>", html_escaped(human_text(row[c], table.columns[c].unit)));
    out += "</tr>\n";
  }
  return out + "</tbody></table>";
}

/// `text` with every "@key@" replaced; keys are replaced once, in the template only, never in what was put in.
std::string filled(std::string_view text, const std::vector<std::pair<std::string_view, std::string>>& values) {
  std::string out;
  while (!text.empty()) {
    size_t first = std::string_view::npos;
    const std::pair<std::string_view, std::string>* which = nullptr;
    for (const auto& v : values) {
      const size_t at = text.find(v.first);
      if (at < first) first = at, which = &v;
    }
    out += text.substr(0, first);
    if (which == nullptr) break;
    out += which->second;
    text.remove_prefix(first + which->first.size());
  }
  return out;
}

}  // namespace

std::string report_json(const Report& report) {
  const Summary summary = summarise(report.cases, report.left_out);
  return page_data(report, summary, said_of(report, summary));
}

std::string render_html(const Report& report, std::string_view revision) {
  const Summary summary = summarise(report.cases, report.left_out);
  const std::vector<Statement> sentences = said_of(report, summary);
  const std::string data = page_data(report, summary, sentences);
  const bool pack = data.size() > kPlainBytes;
  return filled(assets::template_html(),
                {{"@title@", html_escaped(report.title)},
                 {"@subtitle@", html_escaped(subtitle_of(report))},
                 {"@statements@", statements_html(sentences)},
                 {"@connect@", revision.empty() ? "" : "; connect-src 'self'"},
                 {"@revision@", revision.empty() ? "" : fmt::format(" data-revision=\"{}\"", html_escaped(revision))},
                 {"@plain_table@", plain_table_html(report.cases, summary)},
                 {"@css@", std::string(assets::report_css())},
                 {"@packed@", pack ? "deflate" : "no"},
                 {"@timelines@", fmt::to_string(report.timelines.size())},
                 {"@data@", pack ? packed(data) : script_safe(data)},
                 {"@js@", std::string(assets::report_js())}});
}

std::string render_markdown(const Report& report) {
  const Summary summary = summarise(report.cases, report.left_out);
  std::string out = fmt::format("# {}\n\n", markdown_text(report.title));
  for (const Statement& s : said_of(report, summary)) out += fmt::format("- {}\n", markdown_text(s.text));
  if (summary.all.cases > 0) {
    Table table;
    table.columns = {{"ranks"},
                     {"cases"},
                     {"median_error", Unit::kFraction, "median error"},
                     {"worst_error", Unit::kFraction, "worst error"},
                     {"within_10", Unit::kNone, "within 10 %"},
                     {"order", Unit::kNone, "order (tau)"},
                     {"spread", Unit::kFraction, "median spread"},
                     {"unplanned", Unit::kFraction, "median unplanned"},
                     {"peak_exact", Unit::kNone, "peak exact"},
                     {"wire_exact", Unit::kNone, "wire exact"}};
    const auto add = [&](Value ranks, const Accuracy& a) {
      table.rows.push_back({std::move(ranks), int64_t{a.cases}, a.median_abs_pct / 100, a.worst_abs_pct / 100, int64_t{a.within_10},
                            a.order ? Value(*a.order) : Value(), a.median_spread, a.median_unplanned, int64_t{a.peak_exact},
                            int64_t{a.wire_exact}});
    };
    for (const auto& [ranks, a] : summary.by_world_size) add(int64_t{ranks}, a);
    add(std::string("all"), summary.all);
    out += "\n" + print_markdown(table);
  }
  out += "\n" + print_markdown(without_empty_columns(case_table(report.cases, kPlainColumns)));
  if (std::ranges::any_of(report.cases, is_outside)) out += "\n" + print_markdown(case_table(report.cases, kOutsideColumns));
  const Table unplanned = unplanned_memory_table(report.cases);
  if (!unplanned.rows.empty()) out += "\n" + print_markdown(unplanned);
  const RunMetadata& m = report.metadata;
  out += fmt::format("\nshardlab {} {} on {} ({}), {}: {}\n", m.program_version, m.commit, markdown_text(m.processor),
                     markdown_text(m.host), m.date, markdown_code(m.command));
  return out;
}

}  // namespace shardlab::reports
