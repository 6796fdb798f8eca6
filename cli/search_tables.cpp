#include "cli/search_tables.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "cli/namespaces.h"
#include "plan/base/hash.h"
#include "plan/base/values.h"
#include "reports/columns.h"
#include "reports/format.h"
#include "simulator/estimator/analytic/doubt.h"

namespace shardlab::cli {
namespace {

using analytic::TimePart;
using search::Candidate;

/// Values by the names of results.csv of one layout that is `ok`.
std::map<std::string, Value> row_of(const SearchTask& task, const Candidate& c) {
  std::map<std::string, Value> row{{"status", std::string("ok")},
                                   {"name", layout_words(c.point)},
                                   {"predicted_by", std::string("analytic")},
                                   {"model", task.model_name},
                                   {"parameters", task.parameters},
                                   {"machine", task.machine.id},
                                   {"world_size", c.point.world_size()},
                                   {"global_batch_tokens", c.point.tokens_per_step()}};
  for (const auto& [key, word] : answers::words_of(c.point)) row[key] = typed(word);
  row["case_id"] = case_id_of(task, c);
  for (const Figure& f : figures_of(task, c)) row[f.name] = f.value;
  return row;
}

}  // namespace

std::string case_id_of(const SearchTask& task, const Candidate& c) {
  uint64_t id = hash_text(task.model_name + " " + task.machine.id);
  for (const auto& [key, word] : answers::words_of(c.point)) id = hash_text(fmt::format(" {}={}", key, word), id);
  return fmt::format("{:016x}", id);
}

Table layout_table(const SearchTask& task, std::span<const Candidate> layouts) {
  // A layout has the keys that some need and others do not; a row of each.
  std::vector<std::map<std::string, Value>> rows;
  std::vector<TableColumn> keys, figures;
  const auto add = [](std::vector<TableColumn>& columns, TableColumn column) {
    const bool known = std::any_of(columns.begin(), columns.end(), [&](const TableColumn& c) { return c.name == column.name; });
    if (!known) columns.push_back(std::move(column));
  };
  for (const Candidate& c : layouts) {
    std::map<std::string, Value> row;
    for (const auto& [key, word] : answers::words_of(c.point)) row[key] = typed(word), add(keys, {key});
    for (const Figure& f : figures_of(task, c)) row[f.name] = f.value, add(figures, {f.name, f.unit, f.heading});
    rows.push_back(std::move(row));
  }
  Table table{{{"rank"}}, {}};
  table.columns.insert(table.columns.end(), keys.begin(), keys.end());
  table.columns.insert(table.columns.end(), figures.begin(), figures.end());
  for (size_t i = 0; i < rows.size(); ++i) {
    std::vector<Value> cells{static_cast<int64_t>(i + 1)};
    for (size_t c = 1; c < table.columns.size(); ++c) cells.push_back(rows[i][table.columns[c].name]);
    table.rows.push_back(std::move(cells));
  }
  return table;
}

namespace {

std::string verdict_word(whatif::Verdict verdict) {
  switch (verdict) {
    case whatif::Verdict::kFits: return "yes";
    case whatif::Verdict::kTight: return "likely";
    case whatif::Verdict::kUnknown: return "?";
    case whatif::Verdict::kUnlikely:
    case whatif::Verdict::kNo: break;
  }
  return "no";
}

/// Words of the layout that are not in `shared`.
std::string words_beside(const search::Point& point, const std::map<std::string_view, std::string>& shared) {
  std::string text;
  for (const LayoutWord& part : layout_parts(point))
    if (!shared.contains(part.key)) text += (text.empty() ? "" : " ") + part.word;
  return text;
}

/// Words that all layouts have, by key. dp, tp and pp stay in the rows: they are what a row is known by.
std::map<std::string_view, std::string> shared_words(std::span<const Candidate> layouts) {
  std::map<std::string_view, std::string> shared;
  if (layouts.size() < 2) return shared;
  for (const LayoutWord& part : layout_parts(layouts[0].point))
    if (part.key != "dp" && part.key != "tp" && part.key != "pp") shared[part.key] = part.word;
  for (const Candidate& c : layouts) {
    const std::vector<LayoutWord> parts = layout_parts(c.point);
    std::erase_if(shared, [&](const auto& word) {
      return std::ranges::none_of(parts, [&](const LayoutWord& p) { return p.key == word.first && p.word == word.second; });
    });
  }
  return shared;
}

analytic::RunBill bill_of(const SearchTask& task, const Candidate& c) {
  return analytic::bill(task.study_of(c.point).prepared, c.point, c.estimate, task.tokens, task.price);
}

std::string days_text(double days) { return days < 9.95 ? fmt::format("{:.1f}", days) : fmt::format("{:.0f}", days); }

}  // namespace

AnswerTable answer_table(const SearchTask& task, std::span<const Candidate> layouts, bool ranked) {
  AnswerTable answer;
  const auto shared = shared_words(layouts);
  if (!layouts.empty())
    for (const LayoutWord& part : layout_parts(layouts[0].point))
      if (shared.contains(part.key)) answer.shared += (answer.shared.empty() ? "" : " ") + part.word;
  const bool several = task.studies.size() > 1, billed = task.tokens > 0, priced = billed && task.price.device_hour_usd > 0;
  std::vector<TableColumn>& columns = answer.table.columns;
  const auto add = [&](bool present, const char* heading, bool right) {
    if (present) columns.push_back({.name = heading, .right = right});
  };
  add(ranked, "#", true), add(several, "devices", true);
  columns.push_back({.name = "layout", .wraps = true});
  add(true, "step", true), add(true, "tok/s/dev", true), add(true, "MFU", true), add(true, "memory", true),
      add(true, "fits", false);
  add(billed, "days", true), add(priced, "cost", true);
  for (size_t i = 0; i < layouts.size(); ++i) {
    const Candidate& c = layouts[i];
    std::vector<Value> row;
    if (ranked) row.emplace_back(fmt::format("{}{}", i > 0 && equal_to_first(task, layouts[0], c) ? "=" : "", i + 1));
    if (several) row.emplace_back(fmt::to_string(c.point.world_size()));
    const Value used = mfu(task, c);
    const double* share = std::get_if<double>(&used);
    row.insert(row.end(), {words_beside(c.point, shared), brief_seconds(c.seconds()),
                           brief_count(c.estimate.tokens_per_s(c.point) / static_cast<double>(c.point.world_size())),
                           share ? Value(brief_percent(*share)) : Value(), brief_bytes(c.bytes()),
                           verdict_word(verdict_of(c.estimate.memory, task.options))});
    const analytic::RunBill bill = billed ? bill_of(task, c) : analytic::RunBill{};
    if (billed) row.emplace_back(days_text(bill.days));
    if (priced) row.emplace_back(money_text(bill.usd));
    answer.table.rows.push_back(std::move(row));
  }
  return answer;
}

std::string answer_sentence(const SearchTask& task, const Candidate& c) {
  std::string text = fmt::format("{}, {} a step", layout_words(c.point), brief_seconds(c.seconds()));
  if (task.studies.size() > 1) text = fmt::format("{} devices, ", c.point.world_size()) + text;
  const Value used = mfu(task, c);
  if (const double* share = std::get_if<double>(&used)) text += fmt::format(", {} MFU", brief_percent(*share));
  text += ", " + brief_bytes(c.bytes());
  if (task.options.capacity_bytes > 0) text += " of " + brief_bytes(task.options.capacity_bytes);
  const whatif::Verdict verdict = verdict_of(c.estimate.memory, task.options);
  if (verdict == whatif::Verdict::kTight) text += " (likely fits)";
  if (verdict == whatif::Verdict::kUnknown) text += " (the device's memory is not known)";
  if (task.tokens <= 0) return text;
  const analytic::RunBill bill = bill_of(task, c);
  text += fmt::format(", {} days", days_text(bill.days));
  if (task.price.device_hour_usd > 0) text += ", " + money_text(bill.usd);
  return text;
}

Table loser_table(const search::Found& found) {
  Table table{{{"points", Unit::kCount},
               {"reason", Unit::kNone, "lost because"},
               {"nearest", Unit::kNone, "nearest", true},
               {"predicted_step_s", Unit::kSeconds, "its step"},
               {"predicted_device_bytes", Unit::kBytes, "its bytes"},
               {"is_bound", Unit::kNone, "not estimated: at least"}},
              {}};
  for (const search::Loser& l : found.losers)
    table.rows.push_back({l.points, l.reason(), layout_words(l.nearest), l.seconds > 0 ? Value(l.seconds) : Value(),
                          l.bytes > 0 ? Value(l.bytes) : Value(), l.is_bound});
  return table;
}

Table loser_summary(const search::Found& found) {
  Table table{{{.name = "layouts", .right = true},
               {.name = "why", .wraps = true},
               {.name = "nearest layout", .wraps = true},
               {.name = "its step", .right = true},
               {.name = "its memory", .right = true}},
              {}};
  constexpr int kCauses = 3;  // of losing by time or memory that have a row of their own
  int causes = 0;
  search::Loser rest;
  std::string rest_names;
  const auto add = [&](const search::Loser& l, std::string why) {
    const char* least = l.is_bound ? ">=" : "";
    table.rows.push_back({brief_count(static_cast<double>(l.points)), std::move(why), layout_words(l.nearest),
                          l.seconds > 0 ? Value(least + brief_seconds(l.seconds)) : Value(),
                          l.bytes > 0 ? Value(least + brief_bytes(l.bytes)) : Value()});
  };
  for (const search::Loser& l : found.losers) {
    const bool outdone = l.loss == search::Loss::kSlower || l.loss == search::Loss::kLarger;
    if (!outdone || ++causes <= kCauses) {
      add(l, l.reason());
      continue;
    }
    const int64_t points = rest.points + l.points;
    const bool nearer = rest.points == 0 || (l.loss == search::Loss::kLarger ? l.bytes < rest.bytes : l.seconds < rest.seconds);
    if (nearer) rest = l;
    rest.points = points;
  }
  if (rest.points > 0)
    add(rest, rest.loss == search::Loss::kLarger ? "larger: other causes"
              : rest.costs_more                  ? "dearer: other causes"
                                                 : "slower: other causes");
  return table;
}

Table results_table(const SearchTask& task, const search::Found& found) {
  Table table;
  for (const CaseColumn& column : case_columns()) table.columns.push_back({std::string(column.name), column.unit});
  const size_t shared = table.columns.size();
  table.columns.push_back({"rank"});
  table.columns.push_back({"pareto"});
  const auto add = [&](const Candidate& c, Value rank, bool pareto) {
    const auto row = row_of(task, c);
    std::vector<Value> cells;
    for (size_t i = 0; i < shared; ++i) {
      const auto at = row.find(table.columns[i].name);
      cells.push_back(at == row.end() ? Value() : at->second);
    }
    cells.push_back(std::move(rank)), cells.emplace_back(pareto);
    table.rows.push_back(std::move(cells));
  };
  const auto holds = [](const std::vector<Candidate>& list, const Candidate& c) {
    return std::any_of(list.begin(), list.end(), [&](const Candidate& o) { return o.point == c.point; });
  };
  for (size_t i = 0; i < found.best.size(); ++i) add(found.best[i], static_cast<int64_t>(i + 1), holds(found.front, found.best[i]));
  for (const Candidate& c : found.front)
    if (!holds(found.best, c)) add(c, {}, true);
  return table;
}

}  // namespace shardlab::cli
