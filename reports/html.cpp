#include "reports/html.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>

#include "plan/op.h"
#include "reports/assets.h"
#include "reports/columns.h"
#include "reports/escape.h"
#include "reports/explain.h"
#include "reports/format.h"
#include "reports/json.h"
#include "reports/summary.h"

namespace shardlab::reports {

namespace {

using Json = nlohmann::ordered_json;

constexpr std::array<std::string_view, 4> kMoods{"answer", "good", "note", "bad"};

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

Json columns_json() {
  Json out = Json::array();
  for (const CaseColumn& c : case_columns())
    out.push_back(
        {{"name", c.name}, {"unit", name_of(c.unit)}, {"heading", c.heading.empty() ? c.name : c.heading}, {"help", c.help}});
  return out;
}

/// Ops as rows of [stage, label, kind, count, flops, memory, payload, predicted, measured].
Json ops_json(const CaseOutcome& o) {
  Json out = Json::array();
  for (const OpComparison& op : o.ops)
    out.push_back({op.stage, op.label, op.kind, op.count, json_of(op.flops), json_of(op.memory_bytes), json_of(op.payload_bytes),
                   json_of(op.predicted_s), json_of(op.measured_s)});
  return out;
}

Json case_json(const CaseOutcome& o) {
  Json values = Json::array(), losses = Json::array(), memory = Json::array();
  for (const CaseColumn& c : case_columns()) values.push_back(json_of(c.get(o)));
  if (o.measured)
    for (const double loss : o.measured->losses) losses.push_back(json_of(loss));
  if (o.predicted)
    for (const int64_t bytes : o.predicted->memory.bytes) memory.push_back(bytes);
  return {{"layout", layout_text(o.config)},
          {"values", values},
          {"losses", losses},
          {"memory", memory},
          {"budget", o.config.machine.device.memory_bytes},
          {"reasons", reasons(o)},
          {"ops", ops_json(o)}};
}

Json metadata_json(const RunMetadata& m) {
  return {{"program_version", m.program_version},
          {"commit", m.commit},
          {"compiler", m.compiler},
          {"libraries", m.libraries},
          {"command", m.command},
          {"date", m.date},
          {"host", m.host},
          {"processor", m.processor},
          {"system", m.system},
          {"cores", m.cores},
          {"memory_bytes", m.memory_bytes},
          {"calibration_id", m.calibration_id},
          {"recorder_overhead_s", json_of(m.recorder_overhead_s)},
          {"dropped_events", m.dropped_events}};
}

Json accuracy_json(int ranks, const Accuracy& a) {
  return {{"ranks", ranks},
          {"cases", a.cases},
          {"median_abs_pct", json_of(a.median_abs_pct)},
          {"worst_abs_pct", json_of(a.worst_abs_pct)},
          {"within_10", a.within_10},
          {"median_unplanned", json_of(a.median_unplanned)},
          {"peak_exact", a.peak_exact},
          {"wire_cases", a.wire_cases},
          {"wire_exact", a.wire_exact}};
}

Json summary_json(const Summary& s) {
  Json accuracy = Json::array(), losses = Json::array();
  for (const auto& [ranks, a] : s.by_world_size) accuracy.push_back(accuracy_json(ranks, a));
  if (s.all.cases > 0) accuracy.push_back(accuracy_json(0, s.all));
  for (const LossGroup& g : s.losses)
    losses.push_back({{"label", g.label},
                      {"cases", g.cases},
                      {"largest_deviation", json_of(g.largest_deviation)},
                      {"at_step", g.at_step},
                      {"steps", g.steps},
                      {"unigram", g.unigram ? json_of(*g.unigram) : Json(nullptr)}});
  return {{"fastest", s.fastest},
          {"smallest", s.smallest},
          {"by_measurement", s.by_measurement},
          {"accuracy", accuracy},
          {"losses", losses}};
}

/// Intervals as one flat list of numbers: op, begin, duration, peer wait (microseconds), 1 for a wait; five for each interval.
Json intervals_json(const std::vector<TimelineInterval>& intervals) {
  const auto microseconds = [](double s) { return json_of(std::round(s * 1e9) / 1e3); };
  Json out = Json::array();
  for (const TimelineInterval& i : intervals) {
    out.push_back(i.op);
    out.push_back(microseconds(i.begin_s));
    out.push_back(microseconds(i.end_s - i.begin_s));
    out.push_back(microseconds(i.peer_wait_s));
    out.push_back(i.wait ? 1 : 0);
  }
  return out;
}

Json timeline_json(const Timeline& t) {
  Json ops = Json::array(), lanes = Json::array();
  for (const TimelineOp& op : t.ops)
    ops.push_back({op.label, op.kind, json_of(op.flops), json_of(op.memory_bytes), json_of(op.payload_bytes)});
  for (const TimelineLane& lane : t.lanes)
    lanes.push_back({{"rank", lane.rank},
                     {"stream", lane.stream},
                     {"measured", intervals_json(lane.measured)},
                     {"predicted", intervals_json(lane.predicted)}});
  return {{"case_id", t.case_id},          {"label", t.label}, {"step", t.measured_step}, {"left_out", t.left_out},
          {"shown_s", json_of(t.shown_s)}, {"ops", ops},       {"lanes", lanes}};
}

/// The verdicts on claims, then the answer, then what is to be known of the files.
std::vector<Statement> said_of(const Report& report, const Summary& summary) {
  std::vector<Statement> all = report.verdicts;
  for (Statement& s : statements(report.cases, summary)) all.push_back(std::move(s));
  all.insert(all.end(), report.notes.begin(), report.notes.end());
  return all;
}

std::string statements_html(const std::vector<Statement>& all) {
  std::string out;
  for (const Statement& s : all)
    out += fmt::format("<li class=\"{}\">{}</li>\n", kMoods[static_cast<size_t>(s.mood)], html_escaped(s.text));
  return out;
}

/// The table for readers without scripts.
std::string plain_table_html(const std::vector<CaseOutcome>& cases) {
  const Table table = case_table(cases, kPlainColumns);
  std::string out = "<table><thead><tr>";
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

Json report_document(const Report& report, const Summary& summary, const std::vector<Statement>& sentences) {
  Json classes = Json::array(), cases = Json::array(), says = Json::array(), timelines = Json::array();
  for (int c = 0; c < kBufferClasses; ++c) classes.push_back(name_of(static_cast<BufferClass>(c)));
  for (const CaseOutcome& o : report.cases) cases.push_back(case_json(o));
  for (const Statement& s : sentences) says.push_back({{"mood", kMoods[static_cast<size_t>(s.mood)]}, {"text", s.text}});
  for (const Timeline& t : report.timelines) timelines.push_back(timeline_json(t));
  return {
      {"title", report.title}, {"metadata", metadata_json(report.metadata)}, {"columns", columns_json()}, {"classes", classes},
      {"cases", cases},        {"summary", summary_json(summary)},           {"statements", says},        {"timelines", timelines}};
}

std::string dumped(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

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
  return dumped(report_document(report, summary, said_of(report, summary)));
}

std::string render_html(const Report& report) {
  const Summary summary = summarise(report.cases, report.left_out);
  const std::vector<Statement> sentences = said_of(report, summary);
  const std::string subtitle =
      fmt::format("{}{}{}", report.metadata.date, report.metadata.processor.empty() ? "" : " · ", report.metadata.processor);
  return filled(assets::template_html(), {{"@title@", html_escaped(report.title)},
                                          {"@subtitle@", html_escaped(subtitle)},
                                          {"@statements@", statements_html(sentences)},
                                          {"@plain_table@", plain_table_html(report.cases)},
                                          {"@css@", std::string(assets::report_css())},
                                          {"@data@", script_safe(dumped(report_document(report, summary, sentences)))},
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
                     {"unplanned", Unit::kFraction, "median unplanned"},
                     {"peak_exact", Unit::kNone, "peak exact"},
                     {"wire_exact", Unit::kNone, "wire exact"}};
    const auto add = [&](Value ranks, const Accuracy& a) {
      table.rows.push_back({std::move(ranks), int64_t{a.cases}, a.median_abs_pct / 100, a.worst_abs_pct / 100, int64_t{a.within_10},
                            a.median_unplanned, int64_t{a.peak_exact}, int64_t{a.wire_exact}});
    };
    for (const auto& [ranks, a] : summary.by_world_size) add(int64_t{ranks}, a);
    add(std::string("all"), summary.all);
    out += "\n" + print_markdown(table);
  }
  out += "\n" + print_markdown(case_table(report.cases, kPlainColumns));
  if (std::ranges::any_of(report.cases, is_outside)) out += "\n" + print_markdown(case_table(report.cases, kOutsideColumns));
  const Table unplanned = unplanned_memory_table(report.cases);
  if (!unplanned.rows.empty()) out += "\n" + print_markdown(unplanned);
  const RunMetadata& m = report.metadata;
  out += fmt::format("\nshardlab {} {} on {} ({}), {}: {}\n", m.program_version, m.commit, markdown_text(m.processor),
                     markdown_text(m.host), m.date, markdown_code(m.command));
  return out;
}

}  // namespace shardlab::reports
