#include "simulator/estimator/validate/validate.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

namespace shardlab::simulator::validation {
namespace {

std::string percent(std::optional<double> ratio) { return ratio ? fmt::format("{:.3f}", 100 * (*ratio - 1)) : std::string(); }

/// Cells of one row by column.
std::vector<std::pair<std::string, std::string>> predicted_cells(const ScoredRow& row) {
  std::vector<std::pair<std::string, std::string>> cells;
  const bool ok = row.prediction.ok();
  const auto add = [&](const char* column, const std::string& value) { cells.emplace_back(column, ok ? value : std::string()); };
  const Prediction p = ok ? *row.prediction : Prediction{};
  const std::optional<bool> fits = p.fits();
  add("predicted_step_s", fmt::format("{:.9g}", p.step_s));
  add("predicted_live_bytes", fmt::format("{}", p.of(MemoryKind::kLive)));
  add("predicted_reserved_bytes", fmt::format("{}", p.of(MemoryKind::kReserved)));
  add("predicted_device_bytes", fmt::format("{}", p.of(MemoryKind::kDevice)));
  add("predicted_low_s", row.step ? fmt::format("{:.9g}", row.step->low) : "");
  add("predicted_high_s", row.step ? fmt::format("{:.9g}", row.step->high) : "");
  add("predicted_low_bytes", row.memory ? fmt::format("{:.0f}", row.memory->low) : "");
  add("predicted_high_bytes", row.memory ? fmt::format("{:.0f}", row.memory->high) : "");
  add("predicted_fits", !fits ? "" : *fits ? "true" : "false");
  cells.emplace_back("status", ok ? "ok" : "refused");
  cells.emplace_back("reason", ok ? std::string() : to_string(row.prediction.error()));
  add("step_error_pct", percent(row.ratio()));
  add("memory_error_pct", percent(row.memory_ratio()));
  add("note", p.note);
  for (const auto& [part, seconds] : p.parts)
    cells.emplace_back(fmt::format("predicted_{}_s", part), fmt::format("{:.6g}", seconds));
  return cells;
}

}  // namespace

std::string ScoredRow::field(std::string_view column) const {
  const int at = table->csv.column(column);
  return at < 0 ? std::string() : table->csv.records[index][static_cast<size_t>(at)].text;
}

std::optional<double> ScoredRow::ratio() const {
  if (!prediction.ok() || !row().run.ok() || !row().run->measured.step_s) return std::nullopt;
  return prediction->step_s / *row().run->measured.step_s;
}

std::optional<double> ScoredRow::memory_ratio() const {
  if (!prediction.ok() || !row().run.ok() || !row().run->measured.bytes) return std::nullopt;
  const RunMeasured& m = row().run->measured;
  return static_cast<double>(prediction->of(m.kind)) / static_cast<double>(*m.bytes);
}

std::vector<ScoredRow> predict_rows(std::span<const RowTable> tables, const Predictor& predict) {
  std::vector<ScoredRow> scored;
  for (const RowTable& table : tables)
    for (size_t i = 0; i < table.rows.size(); ++i) {
      const Result<Run>& run = table.rows[i].run;
      scored.push_back({&table, i, run.ok() ? predict(*run) : Result<Prediction>(run.error()), {}, {}});
    }
  return scored;
}

TextTable rows_table(std::span<const ScoredRow> rows) {
  TextTable out;
  std::set<const RowTable*> tables;
  for (const ScoredRow& row : rows) tables.insert(row.table);
  std::map<std::string, size_t> at;
  const auto column = [&](const std::string& name) {
    const auto [entry, fresh] = at.try_emplace(name, out.columns.size());
    if (fresh) out.columns.push_back(name);
    return entry->second;
  };
  if (tables.size() > 1) column("set");
  for (const ScoredRow& row : rows)
    if (tables.erase(row.table) > 0)
      for (const std::string& name : row.table->csv.columns) column(name);
  std::vector<std::vector<std::pair<std::string, std::string>>> predicted;
  for (const ScoredRow& row : rows)
    for (const auto& [name, value] : predicted.emplace_back(predicted_cells(row))) column(name);
  for (size_t i = 0; i < rows.size(); ++i) {
    std::vector<std::string>& cells = out.rows.emplace_back(out.columns.size());
    if (at.count("set") > 0) cells[at["set"]] = rows[i].table->name;
    for (const std::string& name : rows[i].table->csv.columns) cells[at[name]] = rows[i].field(name);
    for (const auto& [name, value] : predicted[i]) cells[at[name]] = value;
  }
  return out;
}

}  // namespace shardlab::simulator::validation
