#include "reports/page_data.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>

#include "plan/op_fields.h"
#include "reports/columns.h"
#include "reports/explain.h"
#include "reports/format.h"
#include "reports/json.h"
#include "reports/waterfall.h"

namespace shardlab::reports {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::array<std::string_view, 4> kMoods{"answer", "good", "note", "bad"};
constexpr size_t kExact = 4000;       ///< cases whose numbers are exact
constexpr size_t kDetailed = 300;     ///< cases with reasons, losses and ops; of more cases, the fastest
constexpr size_t kOpsOfCase = 400;    ///< rows of a case's op table, the longest first
constexpr size_t kCasesWithOps = 60;  ///< and cases that have one

double six_digits(double v) { return std::strtod(fmt::format("{:.6g}", v).c_str(), nullptr); }

/// A list of what `get` makes of each element.
template <class List, class Get>
Json each(const List& list, Get get) {
  Json out = Json::array();
  for (const auto& v : list) out.push_back(get(v));
  return out;
}

// ---- Columns -----------------------------------------------------------------------------------------------------------------

constexpr size_t kManyCases = 256;  ///< of as many, figures that repeat are written once

bool is_word(const Value& v) { return std::holds_alternative<std::string>(v); }
bool is_nan(const Value& v) { return std::holds_alternative<double>(v) && std::isnan(std::get<double>(v)); }

/// {"d": different values, "i": numbers}; nothing where there are more than `most`.
std::optional<Json> dictionary_json(const std::vector<Value>& values, size_t most) {
  Json dictionary = Json::array(), list = Json::array();
  std::map<Value, size_t> numbers;
  for (const Value& v : values) {
    const auto [found, fresh] = numbers.try_emplace(v, numbers.size());
    if (fresh && numbers.size() > most) return std::nullopt;
    if (fresh) dictionary.push_back(json_of(v));
    list.push_back(found->second);
  }
  return Json{{"d", dictionary}, {"i", list}};
}

/// Values of a column: {"c": value} of all cases, {"d": values, "i": numbers} of words and of figures that repeat, or a list.
Json values_json(std::vector<Value> values, bool rounded) {
  if (std::ranges::all_of(values, [&](const Value& v) { return v == values.front(); }))
    return {{"c", values.empty() ? Json(nullptr) : json_of(values.front())}};
  if (std::ranges::any_of(values, is_word)) return *dictionary_json(values, values.size());
  if (rounded)
    for (Value& v : values)
      if (const double* number = std::get_if<double>(&v)) v = six_digits(*number);
  if (values.size() >= kManyCases && std::ranges::none_of(values, is_nan))
    if (auto repeated = dictionary_json(values, values.size() / 4)) return *std::move(repeated);
  return each(values, [](const Value& v) { return json_of(v); });
}

/// Columns of the page beside those of results.csv.
std::vector<CaseColumn> page_columns(const Report& report) {
  std::vector<CaseColumn> all;
  all.push_back({"layout", Unit::kNone, "layout", "the layout in words",
                 [](const CaseOutcome& o) { return Value(layout_text(o.config)); }, true});
  all.push_back({"budget_bytes", Unit::kBytes, "device memory", "memory of one device", [](const CaseOutcome& o) {
                   // On a mixed machine, of the device of the stage whose peak is the case's.
                   if (o.predicted && !o.predicted->stages.empty())
                     return Value(std::ranges::max_element(o.predicted->stages, {}, &StageNeed::peak_bytes)->capacity_bytes);
                   return o.config.machine.device.memory_bytes > 0 ? Value(o.config.machine.device.memory_bytes) : Value();
                 }});
  all.push_back({"device", Unit::kNone, "device", "model of the device",
                 [](const CaseOutcome& o) { return Value(o.config.machine.device.id); }});
  for (const ExtraColumn& c : report.extra)
    all.push_back({c.name, c.unit, c.heading, c.help,
                   [&report, &c](const CaseOutcome& o) {
                     const auto at = static_cast<size_t>(&o - report.cases.data());
                     return at < c.values.size() ? c.values[at] : Value();
                   },
                   c.is_setting});
  return all;
}

Json column_json(const CaseColumn& c, const Report& report, bool rounded) {
  std::vector<Value> values;
  values.reserve(report.cases.size());
  for (const CaseOutcome& o : report.cases) values.push_back(c.get(o));
  return {{"name", c.name}, {"unit", name_of(c.unit)}, {"heading", c.heading.empty() ? c.name : c.heading},
          {"help", c.help}, {"setting", c.is_setting}, {"values", values_json(values, rounded)}};
}

/// The bars of every case's waterfall: a column a bar that some case has.
void add_bars(const Report& report, bool measured, bool rounded, Json& columns) {
  std::map<std::string_view, std::vector<Value>> seconds;
  for (size_t i = 0; i < report.cases.size(); ++i)
    for (const Bar& bar : waterfall(report.cases[i], measured)) {
      auto& values = seconds[bar.name];
      values.resize(report.cases.size());
      values[i] = bar.seconds;
    }
  const std::string side = measured ? "measured" : "predicted";
  for (const std::string_view name : bar_names())
    if (const auto found = seconds.find(name); found != seconds.end())
      columns.push_back({{"name", fmt::format("{}_part_{}", side, name)},
                         {"unit", "s"},
                         {"heading", fmt::format("{} {}", side, name)},
                         {"help", "part of the step of the slowest rank; the parts add up to it"},
                         {"setting", false},
                         {"values", values_json(found->second, rounded)}});
}

/// Memory at the peak by class: a column a class that some case has.
void add_classes(const Report& report, Json& columns) {
  for (const bool measured : {false, true})
    for (int c = 0; c < kBufferClasses; ++c) {
      std::vector<Value> values(report.cases.size());
      bool any = false;
      for (size_t i = 0; i < report.cases.size(); ++i) {
        const CaseOutcome& o = report.cases[i];
        const MemoryByClass* memory =
            measured ? (o.measured ? &o.measured->memory : nullptr) : (o.predicted ? &o.predicted->memory : nullptr);
        if (memory == nullptr || memory->bytes[static_cast<size_t>(c)] <= 0) continue;
        values[i] = memory->bytes[static_cast<size_t>(c)], any = true;
      }
      if (!any) continue;
      const std::string side = measured ? "measured" : "predicted", name(name_of(static_cast<BufferClass>(c)));
      columns.push_back({{"name", fmt::format("{}_class_{}", side, name)},
                         {"unit", "B"},
                         {"heading", fmt::format("{} {}", side, name)},
                         {"help", "live bytes of this class at the peak, on the rank with the highest"},
                         {"setting", false},
                         {"values", values_json(values, false)}});
    }
}

Json columns_json(const Report& report, bool rounded) {
  Json out = Json::array();
  const std::vector<CaseColumn> own = page_columns(report);
  for (const CaseColumn& c : case_columns())
    if (std::ranges::find(report.extra, c.name, &ExtraColumn::name) == report.extra.end())
      out.push_back(column_json(c, report, rounded));
  for (const CaseColumn& c : own) out.push_back(column_json(c, report, rounded));
  for (const bool measured : {false, true}) add_bars(report, measured, rounded, out);
  add_classes(report, out);
  return out;
}

// ---- Details of single cases -------------------------------------------------------------------------------------------------

/// Ops as rows of [stage, label, kind, count, flops, memory, payload, predicted, measured], the longest.
Json ops_json(const CaseOutcome& o) {
  std::vector<const OpComparison*> ops;
  for (const OpComparison& op : o.ops) ops.push_back(&op);
  std::ranges::stable_sort(ops, std::greater(), [](const OpComparison* op) { return std::max(op->predicted_s, op->measured_s); });
  if (ops.size() > kOpsOfCase) ops.resize(kOpsOfCase);
  Json out = Json::array();
  for (const OpComparison* op : ops)
    out.push_back({op->stage, op->label, op->kind, op->count, json_of(op->flops), json_of(op->memory_bytes),
                   json_of(op->payload_bytes), json_of(op->predicted_s), json_of(op->measured_s)});
  return out;
}

/// `needs`: of a mixed machine, what each stage has of its own device; else empty.
Json stages_json(const std::vector<StageMemory>& stages, const std::vector<StageNeed>& needs) {
  Json out = Json::array();
  for (const StageMemory& s : stages) {
    Json stage{{"stage", s.stage}, {"ranks", s.ranks}, {"memory", s.at_peak.bytes}, {"peak", s.peak_bytes}, {"moment", s.moment}};
    if (s.measured_bytes) stage["measured"] = *s.measured_bytes;
    if (const auto at = static_cast<size_t>(s.stage); at < needs.size())
      stage["device"] = needs[at].device, stage["layers"] = needs[at].layers, stage["budget"] = needs[at].capacity_bytes;
    out.push_back(std::move(stage));
  }
  return out;
}

/// Rows of [op, kind, communicator, ranks, nodes, bytes, runs in a step, algorithm, why, [[algorithm, seconds], ...]].
Json collectives_json(const std::vector<PricedCollective>& collectives, const Case& config) {
  const auto name = [](Algorithm a) { return kAlgorithms[static_cast<size_t>(a)]; };
  Json out = Json::array();
  for (const PricedCollective& c : collectives) {
    Json prices = Json::array();
    for (const PricedCollective::Price& price : c.prices) prices.push_back({name(price.algorithm), json_of(price.seconds)});
    out.push_back({c.op, c.kind, c.comm, c.ranks, c.nodes, c.bytes, c.runs, name(c.algorithm), origin_of(c, config), prices});
  }
  return out;
}

double rate_of(const CaseOutcome& o) {
  const double step = o.measured ? o.measured->step_s : o.predicted ? o.predicted->step_s : 0;
  return o.status == Status::kOk && step > 0 ? static_cast<double>(o.config.train.global_batch_tokens) / step : 0;
}

/// The cases that are told in full: all of few; of many, the fastest, the smallest, and those with pictures.
std::vector<size_t> detailed(const Report& report, const Summary& summary) {
  std::vector<size_t> order(report.cases.size());
  std::iota(order.begin(), order.end(), size_t{0});
  if (order.size() <= kDetailed) return order;
  std::ranges::stable_sort(order, std::greater(), [&](size_t i) { return rate_of(report.cases[i]); });
  order.resize(kDetailed);
  for (size_t i = 0; i < report.cases.size(); ++i)
    if (static_cast<int>(i) == summary.smallest || report.details.contains(report.cases[i].case_id)) order.push_back(i);
  std::ranges::sort(order);
  order.erase(std::unique(order.begin(), order.end()), order.end());
  return order;
}

Json details_json(const Report& report, const Summary& summary) {
  Json out = Json::object();
  size_t with_ops = 0;
  for (const size_t i : detailed(report, summary)) {
    const CaseOutcome& o = report.cases[i];
    Json detail{{"reasons", reasons(o)}};
    if (o.measured && !o.measured->losses.empty()) {
      Json losses = Json::array();
      for (const double loss : o.measured->losses) losses.push_back(json_of(loss));
      detail["losses"] = std::move(losses);
    }
    if (!o.ops.empty() && with_ops++ < kCasesWithOps) detail["ops"] = ops_json(o);
    if (const auto more = report.details.find(o.case_id); more != report.details.end()) {
      if (!more->second.stages.empty())
        detail["stages"] = stages_json(more->second.stages, o.predicted ? o.predicted->stages : std::vector<StageNeed>());
      if (!more->second.collectives.empty()) detail["collectives"] = collectives_json(more->second.collectives, o.config);
      if (!more->second.yaml.empty()) detail["yaml"] = more->second.yaml;
    }
    out[fmt::to_string(i)] = std::move(detail);
  }
  return out;
}

// ---- Timelines ---------------------------------------------------------------------------------------------------------------

Json microseconds(double s) { return json_of(std::round(s * 1e9) / 1e3); }

Json intervals_json(const std::vector<TimelineInterval>& list) {
  return {{"op", each(list, [](const auto& i) { return i.op; })},
          {"t", each(list, [](const auto& i) { return microseconds(i.begin_s); })},
          {"d", each(list, [](const auto& i) { return microseconds(i.end_s - i.begin_s); })},
          {"peer", each(list, [](const auto& i) { return microseconds(i.peer_wait_s); })},
          {"wait", each(list, [](const auto& i) { return i.wait ? 1 : 0; })}};
}

/// A call begins so many nanoseconds after the end of the call before it: where calls are alike, columns repeat and pack well.
Json calls_json(const std::vector<TimelineCall>& list, const std::vector<CallShape>& shapes) {
  int64_t end = 0;
  const Json gaps = each(list, [&](const TimelineCall& c) {
    const CallShape& shape = shapes[static_cast<size_t>(c.shape)];
    const int64_t gap = c.origin_ns - c.peer_wait_ns - shape.lead_ns - c.wait_ns - end;
    end = c.origin_ns + shape.end_ns;
    return gap;
  });
  return {{"shape", each(list, [](const auto& c) { return c.shape; })},
          {"gap", gaps},
          {"wait", each(list, [](const auto& c) { return c.wait_ns; })},
          {"peer", each(list, [](const auto& c) { return c.peer_wait_ns; })},
          {"layer", each(list, [](const auto& c) { return c.layer; })},
          {"m", each(list, [](const auto& c) { return c.micro_batch; })}};
}

/// Shapes in columns, and then their ops, one shape after the other.
Json shapes_json(const TimelineCalls& calls) {
  std::vector<ShapeOp> ops;
  for (const CallShape& s : calls.shapes) ops.insert(ops.end(), s.ops.begin(), s.ops.end());
  return {{"segments", calls.segments},
          {"segment", each(calls.shapes, [](const auto& s) { return s.segment; })},
          {"lead", each(calls.shapes, [](const auto& s) { return s.lead_ns; })},
          {"end", each(calls.shapes, [](const auto& s) { return s.end_ns; })},
          {"busy", each(calls.shapes, [](const auto& s) { return s.busy_ns; })},
          {"count", each(calls.shapes, [](const auto& s) { return s.count; })},
          {"placed", each(calls.shapes, [](const auto& s) { return s.ops.size(); })},
          {"op", each(ops, [](const auto& o) { return o.op; })},
          {"t", each(ops, [](const auto& o) { return o.begin_ns; })},
          {"d", each(ops, [](const auto& o) { return o.lasts_ns; })},
          {"peer", each(ops, [](const auto& o) { return o.peer_wait_ns; })},
          {"wait", each(ops, [](const auto& o) { return o.wait ? 1 : 0; })}};
}

Json slots_json(const std::vector<GridSlot>& list) {
  return {{"m", each(list, [](const auto& s) { return s.micro_batch; })},
          {"phase", each(list, [](const auto& s) { return std::string(1, s.phase); })},
          {"layer", each(list, [](const auto& s) { return s.layer; })},
          {"t", each(list, [](const auto& s) { return microseconds(s.begin_s); })},
          {"d", each(list, [](const auto& s) { return microseconds(s.end_s - s.begin_s); })}};
}

Json live_json(const LiveCurve& curve) {
  Json bytes = Json::array();
  for (int c = 0; c < kBufferClasses; ++c)
    bytes.push_back(each(curve.points, [&](const LiveBytes& p) { return p.bytes.bytes[static_cast<size_t>(c)]; }));
  return {{"rank", curve.rank},
          {"stage", curve.stage},
          {"t", each(curve.points, [](const LiveBytes& p) { return microseconds(p.at_s); })},
          {"bytes", bytes},
          {"items", each(curve.items, [](const LiveItem& i) {
             return Json{i.name, name_of(i.kind), i.bytes};
           })}};
}

Json timeline_json(const Report& report, const Timeline& t) {
  const auto of = std::ranges::find(report.cases, t.case_id, &CaseOutcome::case_id);
  return {{"index", of == report.cases.end() ? -1 : of - report.cases.begin()},
          {"label", t.label},
          {"step", t.measured_step},
          {"left_out", t.left_out},
          {"shown_s", json_of(t.shown_s)},
          {"simulated", t.made_anew},
          {"ops", each(t.ops,
                       [](const TimelineOp& op) {
                         return Json{op.label, op.kind, json_of(op.flops), json_of(op.memory_bytes), json_of(op.payload_bytes)};
                       })},
          {"shapes", shapes_json(t.calls)},
          {"lanes", each(t.lanes,
                         [&](const TimelineLane& lane) {
                           return Json{{"rank", lane.rank},
                                       {"stage", lane.stage},
                                       {"stream", lane.stream},
                                       {"alike", lane.alike},
                                       {"calls", calls_json(lane.calls, t.calls.shapes)},
                                       {"measured", intervals_json(lane.measured)},
                                       {"predicted", intervals_json(lane.predicted)}};
                         })},
          {"rows", each(t.rows,
                        [](const TimelineRow& row) {
                          return Json{{"rank", row.rank},
                                      {"stage", row.stage},
                                      {"measured", slots_json(row.measured)},
                                      {"predicted", slots_json(row.predicted)}};
                        })},
          {"live", each(t.live, live_json)}};
}

// ---- The rest ----------------------------------------------------------------------------------------------------------------

Json metadata_json(const RunMetadata& m) {
  return {{"program_version", m.program_version},
          {"commit", m.commit},
          {"compiler", m.compiler},
          {"libraries", m.libraries},
          {"command", m.command},
          {"sweep", m.sweep},
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
          {"median_spread", json_of(a.median_spread)},
          {"order", a.order ? json_of(*a.order) : Json(nullptr)},
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
  Json fastest_by_model = Json::array();
  for (const ModelBest& best : s.by_model) fastest_by_model.push_back(best.fastest);
  return {{"fastest", s.fastest},
          {"smallest", s.smallest},
          {"fastest_by_model", fastest_by_model},
          {"by_measurement", s.by_measurement},
          {"accuracy", accuracy},
          {"losses", losses}};
}

std::string_view kind_name(Report::Kind kind) {
  constexpr std::array<std::string_view, 3> kNames{"run", "search", "comparison"};
  return kNames[static_cast<size_t>(kind)];
}

Json changes_json(const std::vector<ChangedFigure>& changes) {
  Json out = Json::array();
  for (const ChangedFigure& c : changes)
    out.push_back({{"a", c.a},
                   {"b", c.b},
                   {"metric", c.metric},
                   {"unit", name_of(c.change.unit)},
                   {"before", json_of(c.change.a)},
                   {"after", json_of(c.change.b)},
                   {"noise", json_of(c.change.noise)},
                   {"verdict", name_of(c.change.verdict)}});
  return out;
}

}  // namespace

std::string_view word_of(Statement::Mood mood) { return kMoods[static_cast<size_t>(mood)]; }

std::string page_data(const Report& report, const Summary& summary, const std::vector<Statement>& statements) {
  const bool rounded = report.cases.size() > kExact;
  Json classes = Json::array(), says = Json::array(), timelines = Json::array(), next = Json::array(), lost = Json::array();
  for (int c = 0; c < kBufferClasses; ++c) classes.push_back(name_of(static_cast<BufferClass>(c)));
  for (const Statement& s : statements) says.push_back({{"mood", word_of(s.mood)}, {"text", s.text}});
  for (const Timeline& t : report.timelines) timelines.push_back(timeline_json(report, t));
  for (const LostLayouts& l : report.lost) lost.push_back({{"layouts", l.layouts}, {"says", l.says}, {"nearest", l.nearest}});
  for (const std::string& step : report.next) next.push_back({{"says", step}});
  const Json document{{"title", report.title},
                      {"lost", lost},
                      {"kind", kind_name(report.kind)},
                      {"changes", changes_json(report.changes)},
                      {"count", report.cases.size()},
                      {"left_out", std::accumulate(report.left_out.begin(), report.left_out.end(), int64_t{0})},
                      {"rounded", rounded},
                      {"metadata", metadata_json(report.metadata)},
                      {"statements", says},
                      {"next", next},
                      {"price", {{"usd", json_of(report.price_usd)}, {"note", report.price_note}}},
                      {"summary", summary_json(summary)},
                      {"classes", classes},
                      {"parts", bar_names()},
                      {"columns", columns_json(report, rounded)},
                      {"details", details_json(report, summary)},
                      {"timelines", timelines}};
  return document.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace shardlab::reports
