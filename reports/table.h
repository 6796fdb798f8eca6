// A table of typed values, and the four ways in which every verb prints one (`--format table|json|csv|markdown`).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace shardlab::reports {

/// One cell. The first alternative is "not applicable": empty text in tables and CSV, null in JSON.
using Value = std::variant<std::monostate, bool, int64_t, double, std::string>;

/// The unit of a column, which decides how `human_text` shows it. Exact forms (JSON, CSV) always hold the bare number in
/// the base unit.
enum class Unit : uint8_t {
  kNone,  ///< words, identifiers, small numbers: shown as they are
  kBytes,
  kSeconds,
  kFraction,  ///< of 1, shown in percent
  kPercent,   ///< signed, already times 100: residuals
  kTokensPerSecond,
  kBytesPerSecond,  ///< rates are decimal, as data sheets give them: 450.0 GB/s
  kCount,           ///< large counts (parameters), shown as 124.4 M
  kFlops,
  kJoules,
  kNats,  ///< losses
};
/// "B", "s", "fraction", "%", "tokens/s", "B/s", "count", "flop", "J", "nat", or "" for kNone.
std::string_view name_of(Unit unit);

struct TableColumn {
  std::string name;  ///< key in JSON and CSV: a word without dots
  Unit unit = Unit::kNone;
  std::string heading;    ///< of people's tables; `name` when empty
  bool shortens = false;  ///< a text that gives way where the line is narrow: what all rows have in common first, then its end
  bool wraps = false;     ///< a text that goes on in further lines of its row where the terminal is narrow
  bool right = false;     ///< a text that is aligned as numbers are
};

struct Table {
  std::vector<TableColumn> columns;
  std::vector<std::vector<Value>> rows;  ///< each as long as `columns`
};

enum class TableFormat : uint8_t { kTable, kJson, kCsv, kMarkdown };
inline constexpr std::string_view kTableFormats = "table, json, csv, markdown";
std::optional<TableFormat> table_format_named(std::string_view name);

/// Full precision, no unit: round-trips. "" for not applicable, "true" and "false" for booleans.
std::string exact_text(const Value& value);

/// With its unit, rounded for reading: "41.20 ms", "1.500 MiB", "+2.31 %", "yes".
std::string human_text(const Value& value, Unit unit);

/// Splits CSV text into records of fields; quoted fields may hold commas, doubled quotes and line ends. Accepts LF and CRLF.
std::vector<std::vector<std::string>> parse_csv(std::string_view text);

/// Aligned columns. With `width` above 0 no line is longer, as far as that is possible. Texts that wrap or shorten give way first: of the
/// latter the words that all rows have, then keys that all have in one order ("tp="), both said above, then the end. The last columns are
/// left out at last, and a line says which.
std::string print_aligned(const Table& table, int width = 0);

/// The table without columns that are empty in every row, for people.
Table without_empty_columns(Table table);

/// Header and one line a row, LF line ends.
std::string print_csv(const Table& table);
/// One line of it, and one field of a line.
void add_csv_row(std::string& out, std::span<const Value> row);
void add_csv_field(std::string& out, const Value& value);

/// A GitHub table of human texts.
std::string print_markdown(const Table& table);

/// An array with one object a row, keyed by column name, two-space indent. Numbers that JSON cannot hold (nan, inf) are null.
std::string print_json(const Table& table);

/// One of the four. `width` is used by kTable only.
std::string print_table(const Table& table, TableFormat format, int width = 0);

}  // namespace shardlab::reports
