#include "reports/stored_rows.h"

#include <fmt/format.h>

#include <algorithm>
#include <variant>

#include "plan/base/check.h"
#include "plan/base/hash.h"
#include "plan/op.h"
#include "plan/same_machine.h"
#include "reports/table.h"

namespace shardlab::reports {

StoredRows::Row StoredRows::row(size_t i) const {
  const Ends before = i > 0 ? rows_[i - 1] : Ends{0, 0, 0, 0}, &row = rows_[i];
  return {std::span(cells_).subspan(before.cells, row.cells - before.cells), text(row.texts, row.key - row.texts),
          text(row.key, row.outcome - row.key)};
}

void StoredRows::clear() { texts_.clear(), cells_.clear(), rows_.clear(), csv_.clear(), machines_.clear(); }

void StoredRows::add(uint16_t column, const Value& value) {
  using Kind = Cell::Kind;
  std::visit(
      Overload{[](std::monostate) {},
               [&](bool v) { cells_.push_back({.column = column, .kind = Kind::kInteger, .integer = v ? 1 : 0}); },
               [&](int64_t v) { cells_.push_back({.column = column, .kind = Kind::kInteger, .integer = v}); },
               [&](double v) { cells_.push_back({.column = column, .kind = Kind::kReal, .real = v}); },
               [&](const std::string& v) {
                 cells_.push_back(
                     {.column = column, .kind = Kind::kText, .size = static_cast<uint32_t>(v.size()), .begin = texts_.size()});
                 texts_ += v;
               }},
      value);
}

namespace {

std::vector<const CaseKey*> keys_of_rows(const CaseDefaults& defaults) {
  std::vector<const CaseKey*> keys = defaults.keys();
  keys.push_back(find_key("machine.id"));
  return keys;
}

}  // namespace

RowMaker::RowMaker(const CaseDefaults& defaults)
    : defaults_(defaults), texts_(keys_of_rows(defaults_)), said_(defaults_.keys().size()), settings_of_(texts_.size()) {
  for (const CaseColumn& column : case_columns()) {
    if (column.key == nullptr) continue;
    size_t key = 0;
    while (key < texts_.size() && &texts_.key(key) != column.key) ++key;
    SHARDLAB_CHECK(key < texts_.size(), "no row has the key of the column {}", column.name);
    settings_of_[key].push_back(settings_.size());
    settings_.push_back({key, {}, {}});
  }
}

void RowMaker::read_settings(const Case& config) {
  bool stale = config_.empty();
  for (const size_t key : texts_.read(config)) {
    for (const size_t at : settings_of_[key]) {
      Setting& setting = settings_[at];
      setting.value = value_of(texts_.key(key), texts_[key]);
      setting.csv.clear();
      add_csv_field(setting.csv, setting.value);
    }
    if (key >= said_.size()) continue;  // the machine's, which outcomes are stored without
    said_[key] = defaults_.leaves_out(key, texts_[key]) ? std::string() : json_member(texts_.key(key).path, texts_[key]);
    stale = true;
  }
  if (!stale) return;
  config_ = "{";
  for (const std::string& member : said_) {
    if (member.empty()) continue;
    if (config_.size() > 1) config_ += ',';
    config_ += member;
  }
  config_ += '}';
}

void RowMaker::add(const CaseOutcome& outcome, StoredRows& rows) {
  read_settings(outcome.config);
  const std::span<const CaseColumn> columns = case_columns();
  auto setting = settings_.begin();
  for (size_t c = 0; c < columns.size(); ++c) {
    if (c > 0) rows.csv_ += ',';
    if (columns[c].key != nullptr) {
      rows.add(static_cast<uint16_t>(c), setting->value);
      rows.csv_ += setting->csv;
      ++setting;
      continue;
    }
    const Value value = columns[c].get(outcome);
    if (std::holds_alternative<std::monostate>(value)) continue;
    rows.add(static_cast<uint16_t>(c), value);
    add_csv_field(rows.csv_, value);
  }
  rows.csv_ += '\n';
  StoredRows::Ends ends{};
  ends.cells = rows.cells_.size();
  ends.texts = rows.texts_.size();
  rows.texts_ += key_of(outcome.config.machine, rows);
  ends.key = rows.texts_.size();
  add_outcome_json(outcome, config_, rows.texts_);
  ends.outcome = rows.texts_.size();
  rows.rows_.push_back(ends);
}

/// The key of a machine, which goes with the rows unless it is one of the last that did. An axis of machines comes back to each of them.
const std::string& RowMaker::key_of(const Machine& machine, StoredRows& rows) {
  constexpr size_t kRemembered = 16;
  const auto known = std::ranges::find_if(known_, [&](const auto& k) { return same(k.first, machine); });
  if (known != known_.end()) return known->second;
  std::string text = machine_to_json(machine);
  std::string key = fmt::format("{:016x}", hash_text(text));
  rows.machines_.emplace_back(key, std::move(text));
  if (known_.size() == kRemembered) known_.clear();
  return known_.emplace_back(machine, std::move(key)).second;
}

}  // namespace shardlab::reports
