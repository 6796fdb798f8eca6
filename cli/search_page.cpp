#include "cli/search_page.h"

#include <fmt/format.h>

#include <algorithm>

#include "cases/analytic_case.h"
#include "cli/search_tables.h"
#include "cli/step_intervals.h"
#include "plan/keys.h"
#include "reports/format.h"

namespace shardlab::cli {
namespace {

CaseOutcome outcome_of(const SearchTask& task, const search::Candidate& c) {
  CaseOutcome o;
  o.config.name = layout_words(c.point);
  o.config.model.name = task.model_name;
  o.config.machine = task.study_of(c.point).prepared.machine();
  o.config.profile = task.study_of(c.point).prepared.profile().name;
  // Keys that a case cannot hold stay in the layout's words, which are its name.
  for (const auto& [word, value] : answers::words_of(c.point))
    if (const CaseKey* key = find_key(word); key != nullptr && key->set != nullptr) key->set(o.config, value);
  o.config.train.global_batch_tokens = c.point.tokens_per_step();
  o.case_id = case_id_of(task, c);
  o.parameters = task.parameters;
  o.predicted = prediction_of(c.estimate);
  o.predicted->model_flops = c.estimate.model_flops;  // of the case's model there is the name alone
  return o;
}

/// The text of a member, empty where there is none.
std::string text_of(const nlohmann::ordered_json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && found->is_string() ? found->get<std::string>() : "";
}
double number_of(const nlohmann::ordered_json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && found->is_number() ? found->get<double>() : 0;
}

/// "dp 16, tp 8, pp 4" of a layout of the object, keys of 1 and "none" left out.
std::string layout_of(const nlohmann::ordered_json& layout) {
  std::string text;
  for (const auto& [key, value] : layout.items()) {
    const std::string word = value.is_string() ? value.get<std::string>() : value.dump();
    if (word == "1" || word == "none" || word == "false" || word == "0" || key == "seq_len" || key == "precision") continue;
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", key, word);
  }
  return text;
}

LostLayouts lost_of(const nlohmann::ordered_json& lost) {
  std::string nearest = layout_of(lost.value("nearest", nlohmann::ordered_json::object()));
  if (const double s = number_of(lost, "predicted_step_s"); s > 0) nearest += fmt::format(": {} a step", brief_seconds(s));
  if (const double b = number_of(lost, "predicted_device_bytes"); b > 0)
    nearest += fmt::format(", {} of a device", brief_bytes(static_cast<int64_t>(b)));
  return {static_cast<int64_t>(number_of(lost, "points")), text_of(lost, "reason"), std::move(nearest)};
}

}  // namespace

std::vector<CaseOutcome> search_outcomes(const SearchTask& task, const search::Found& found) {
  std::vector<CaseOutcome> all;
  for (const search::Candidate& c : found.best) all.push_back(outcome_of(task, c));
  for (const search::Candidate& c : found.front)
    if (std::ranges::none_of(found.best, [&](const search::Candidate& b) { return b.point == c.point; }))
      all.push_back(outcome_of(task, c));
  return all;
}

Result<void> add_search(const nlohmann::ordered_json& search, Report& report) {
  const auto layouts = search.find("layouts"), front = search.find("pareto"), lost = search.find("lost");
  if (layouts == search.end() || !layouts->is_array() || front == search.end() || !front->is_array())
    return Error{ExitCode::kUsage, "search.json is no result of a search: it has no layouts", "search again into a new --out", {}};
  report.kind = Report::Kind::kSearch;
  ExtraColumn rank{"rank", Unit::kNone, "rank", "place by the objective of the search", {}};
  ExtraColumn verdict{"verdict", Unit::kNone, "fits", "whether the device's memory suffices: fits, tight or unknown", {}};
  ExtraColumn reserved{"reserved_bytes", Unit::kBytes, "memory", "what a device's driver is predicted to report", {}};
  ExtraColumn use{
      "predicted_mfu", Unit::kFraction, "predicted MFU", "model flops (no recompute) against the dense peak of the precision", {}};
  ExtraColumn low = step_low_column(), high = step_high_column();
  ExtraColumn equal{
      "equal_to_first", Unit::kNone, "equal to first", "whether the prediction cannot tell the layout from the first", {}};
  const auto add = [&](const nlohmann::ordered_json& layout, Value place) {
    for (ExtraColumn* column : {&low, &high}) {
      const double seconds = number_of(layout, column->name.c_str());
      column->values.push_back(seconds > 0 ? Value(seconds) : Value());
    }
    const auto told = layout.find("equal_to_first");
    equal.values.push_back(told != layout.end() && told->is_boolean() ? Value(told->get<bool>()) : Value());
    rank.values.push_back(std::move(place));
    verdict.values.emplace_back(text_of(layout, "predicted_verdict"));
    reserved.values.emplace_back(static_cast<int64_t>(number_of(layout, "predicted_device_bytes")));
    const double share = number_of(layout, "predicted_mfu");
    use.values.push_back(share > 0 ? Value(share) : Value());
  };
  for (const auto& layout : *layouts) add(layout, static_cast<int64_t>(rank.values.size() + 1));
  // What of the front is ranked stands there already; a layout's figures tell it from all others.
  for (const auto& layout : *front)
    if (std::ranges::find(*layouts, layout) == layouts->end()) add(layout, {});
  if (rank.values.size() != report.cases.size())
    return Error{ExitCode::kUsage,
                 fmt::format("search.json has {} layouts, and the store {}", rank.values.size(), report.cases.size()),
                 "search again into a new --out",
                 {}};
  report.extra = {std::move(rank), std::move(verdict), std::move(reserved), std::move(use),
                  std::move(low),  std::move(high),    std::move(equal)};
  if (lost != search.end() && lost->is_array())
    for (const auto& l : *lost) report.lost.push_back(lost_of(l));
  report.notes.push_back({Statement::Mood::kNote,
                          fmt::format("Looked for the least {} among {} layouts: {} were estimated, {} dismissed by bounds.",
                                      text_of(search, "objective"), count_words(number_of(search, "points")),
                                      count_words(number_of(search, "evaluated")), count_words(number_of(search, "bounded")))});
  return {};
}

}  // namespace shardlab::cli
