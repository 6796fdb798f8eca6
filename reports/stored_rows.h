// Rows of cases, made by one thread and saved by another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plan/key_texts.h"
#include "plan/outcome.h"
#include "reports/columns.h"
#include "reports/outcome_json.h"

namespace shardlab::reports {

/// Rows of the table `cases` of a store and of results.csv, without what the tables `losses` and `ops` hold. A row of an estimate has values
/// in half of the columns, and takes 4 KiB here.
class StoredRows {
 public:
  /// A column of a row that holds a value.
  struct Cell {
    enum class Kind : uint8_t { kInteger, kReal, kText };
    uint16_t column;  ///< place in `case_columns()`
    Kind kind;
    uint32_t size = 0;  ///< bytes of a text
    union {
      int64_t integer;
      double real;
      size_t begin;  ///< of a text: its first byte in `texts_`
    };
  };
  struct Row {
    std::span<const Cell> cells;  ///< in the order of the columns
    std::string_view machine_key;
    std::string_view outcome;  ///< as JSON
  };

  size_t size() const { return rows_.size(); }
  /// Valid until rows are added.
  Row row(size_t i) const;
  std::string_view text(const Cell& cell) const { return text(cell.begin, cell.size); }
  /// The same rows as lines of results.csv.
  const std::string& csv() const { return csv_; }
  /// Machines of the rows, as JSON, by key: those that the rows before did not have.
  std::span<const std::pair<std::string, std::string>> machines() const { return machines_; }
  /// Takes all rows out, and keeps the memory.
  void clear();

 private:
  friend class RowMaker;
  struct Ends {
    size_t cells, key, outcome;  ///< in `cells_` and `texts_`: behind the row's cells, its machine's key, its outcome
    size_t texts;                ///< behind the texts of its cells
  };
  std::string_view text(size_t begin, size_t size) const { return std::string_view(texts_).substr(begin, size); }
  void add(uint16_t column, const Value& value);

  std::string texts_;  ///< row by row: texts of cells, key of the machine, outcome
  std::vector<Cell> cells_;
  std::vector<Ends> rows_;
  std::string csv_;
  std::vector<std::pair<std::string, std::string>> machines_;
};

/// Makes the rows of one case after another. What a row says of settings is written again only where a key has changed.
class RowMaker {
 public:
  /// `defaults`: what stored outcomes leave out.
  explicit RowMaker(const CaseDefaults& defaults);
  RowMaker(const RowMaker&) = delete;
  RowMaker& operator=(const RowMaker&) = delete;

  /// Adds the row of an outcome.
  void add(const CaseOutcome& outcome, StoredRows& rows);

 private:
  /// A column that is the value of a key.
  struct Setting {
    size_t key;  ///< in `texts_`
    Value value;
    std::string csv;
  };
  void read_settings(const Case& config);
  const std::string& key_of(const Machine& machine, StoredRows& rows);

  const CaseDefaults defaults_;
  KeyTexts texts_;                                ///< of the keys of `defaults_`, then of `machine.id`
  std::vector<std::string> said_;                 ///< of each key of `defaults_`: its member of the case's JSON; empty: left out
  std::string config_;                            ///< JSON of the last case
  std::vector<Setting> settings_;                 ///< in the order of the columns
  std::vector<std::vector<size_t>> settings_of_;  ///< by key
  std::vector<std::pair<Machine, std::string>> known_;  ///< machines and their keys
};

}  // namespace shardlab::reports
