// Comma-separated text as users write it, read strictly: every field knows the line and column where it begins.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "plan/base/result.h"

namespace shardlab::simulator {

struct CsvField {
  std::string text;
  int line = 1;    ///< of its first character, counted from 1
  int column = 1;  ///< characters of that line, counted from 1
};

/// A header and records of as many fields.
struct CsvTable {
  std::vector<std::string> columns;
  std::vector<std::vector<CsvField>> records;

  /// Index of a column, or -1.
  int column(std::string_view name) const;
};

/// Reads RFC 4180 text: LF or CRLF line ends, quoted fields with doubled quotes, an optional byte order mark; empty lines are
/// left out. Errors, all of them at once, each with file:line:column: a quote within an unquoted field, text after a closing
/// quote, a quoted field without its end, a record with more or fewer fields than the header, an empty or repeated column name,
/// no record at all.
Result<CsvTable> read_csv(std::string_view text, const std::string& file);

}  // namespace shardlab::simulator
