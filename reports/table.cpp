#include "reports/table.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <numeric>

#include "plan/base/check.h"
#include "plan/base/utf8.h"
#include "plan/op.h"
#include "reports/escape.h"
#include "reports/format.h"
#include "reports/json.h"

namespace shardlab::reports {

namespace {

constexpr int kGap = 2;             ///< blanks between columns
constexpr int kNarrowest = 8;       ///< a shortened text keeps this many columns
constexpr int kNarrowestWrap = 16;  ///< and a wrapped one this many

constexpr std::string_view kTurned = "\u2068";  ///< before a text that is read from right to left (visible_line)

bool is_number(const Value& v) { return std::holds_alternative<int64_t>(v) || std::holds_alternative<double>(v); }

const std::string& heading_of(const TableColumn& c) { return c.heading.empty() ? c.name : c.heading; }

/// Text cells of a table, as people read them, on one line each.
struct Grid {
  std::vector<std::vector<std::string>> rows;
  std::vector<int> widths;
  std::vector<bool> right;  ///< alignment by column
};

Grid grid_of(const Table& table) {
  Grid grid;
  for (const TableColumn& c : table.columns) grid.widths.push_back(display_width(heading_of(c)));
  for (const TableColumn& c : table.columns) grid.right.push_back(c.right);
  for (const auto& row : table.rows) {
    SHARDLAB_CHECK(row.size() == table.columns.size(), "a row of {} cells in a table of {} columns", row.size(),
                   table.columns.size());
    auto& texts = grid.rows.emplace_back();
    for (size_t c = 0; c < row.size(); ++c) {
      texts.push_back(visible_line(human_text(row[c], table.columns[c].unit)));
      grid.widths[c] = std::max(grid.widths[c], display_width(texts.back()));
      if (is_number(row[c])) grid.right[c] = true;
    }
  }
  return grid;
}

int line_width(const std::vector<int>& widths, size_t columns) {
  return std::accumulate(widths.begin(), widths.begin() + static_cast<std::ptrdiff_t>(columns), 0) +
         kGap * static_cast<int>(columns > 0 ? columns - 1 : 0);
}

std::vector<std::string> split_words(const std::string& text) {
  std::vector<std::string> words;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find(' ', at), text.size());
    if (end > at) words.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return words;
}

/// Words in every one of `texts` but for those that are nothing else.
std::vector<std::string> common_words(const std::vector<std::vector<std::string>>& texts) {
  std::vector<std::string> common = texts.front();
  for (const auto& words : texts)
    std::erase_if(common, [&](const std::string& word) { return std::ranges::find(words, word) == words.end(); });
  const bool all = std::ranges::any_of(texts, [&](const auto& words) {
    return std::ranges::all_of(words, [&](const std::string& w) { return std::ranges::find(common, w) != common.end(); });
  });
  return all ? std::vector<std::string>() : common;
}

/// The keys of words "key=value", where all texts have the same ones in one order; else none.
std::vector<std::string> common_keys(const std::vector<std::vector<std::string>>& texts) {
  std::vector<std::string> keys;
  for (const auto& words : texts) {
    std::vector<std::string> own;
    for (const std::string& word : words) own.push_back(word.substr(0, word.find('=')));
    const bool valued = std::ranges::all_of(words, [](const std::string& w) { return w.find('=') + 1 > 1 && !w.ends_with('='); });
    if (!valued || (!keys.empty() && keys != own)) return {};
    keys = std::move(own);
  }
  return keys;
}

/// Takes from the texts of column `c` what all have in common, a step at a time, while lines are wider than `width`. What it took, as
/// lines for above the table.
std::string take_common(Grid& grid, size_t c, const TableColumn& column, int width) {
  std::string said;
  if (grid.rows.size() < 2) return said;
  std::vector<std::vector<std::string>> texts;
  for (const auto& row : grid.rows) {
    if (row[c].find(kTurned) != std::string::npos) return said;  // a text is isolated as a whole
    texts.push_back(split_words(row[c]));
  }
  const auto put = [&] {
    grid.widths[c] = display_width(heading_of(column));
    for (size_t r = 0; r < texts.size(); ++r) {
      grid.rows[r][c] = fmt::format("{}", fmt::join(texts[r], " "));
      grid.widths[c] = std::max(grid.widths[c], display_width(grid.rows[r][c]));
    }
  };
  if (const auto common = common_words(texts); !common.empty()) {
    for (auto& words : texts)
      std::erase_if(words, [&](const std::string& w) { return std::ranges::find(common, w) != common.end(); });
    put();
    said += fmt::format("{}, in every row: {}\n", heading_of(column), fmt::join(common, " "));
  }
  if (line_width(grid.widths, grid.widths.size()) <= width) return said;
  if (const auto keys = common_keys(texts); !keys.empty()) {
    for (auto& words : texts)
      for (std::string& word : words) word.erase(0, word.find('=') + 1);
    put();
    said += fmt::format("{}: the values of {}\n", heading_of(column), fmt::join(keys, ", "));
  }
  return said;
}

/// The least width of a column: the width of its heading, or a few characters for a text that may be shortened.
int least_width(const TableColumn& column, int width) {
  const bool gives_way = column.shortens || column.wraps;
  return gives_way ? std::min(width, std::max(column.wraps ? kNarrowestWrap : kNarrowest, display_width(heading_of(column))))
                   : width;
}

/// How many of the first columns fit into `width` when every text that may be shortened is.
size_t columns_that_fit(const Table& table, std::vector<int> widths, int width) {
  for (size_t c = 0; c < widths.size(); ++c) widths[c] = least_width(table.columns[c], widths[c]);
  size_t columns = widths.size();
  while (columns > 1 && line_width(widths, columns) > width) --columns;
  return columns;
}

/// Narrows texts of the first `columns` that may be shortened, widest first, until the line fits or none can give more.
void shorten(const Table& table, std::vector<int>& widths, size_t columns, int width) {
  for (int excess = line_width(widths, columns) - width; excess > 0; --excess) {
    size_t widest = columns;
    for (size_t c = 0; c < columns; ++c)
      if (widths[c] > least_width(table.columns[c], widths[c]) && (widest == columns || widths[c] > widths[widest])) widest = c;
    if (widest == columns) return;
    --widths[widest];
  }
}

/// A text of one line in lines of at most `width`: at blanks, and in a word that is wider after a "_", ".", "/" or ",".
std::string broken(const std::string& text, int width) {
  std::string lines = wrapped(text, width), out;
  for (;;) {
    const size_t end = std::min(lines.find('\n'), lines.size());
    const std::string line = lines.substr(0, end);
    const size_t mark = line.find_last_of("_./,", static_cast<size_t>(std::max(width, 1)) - 1);
    if (display_width(line) > width && mark != std::string::npos && mark > 0) {
      out += line.substr(0, mark + 1) + '\n';
      std::string rest = lines.substr(mark + 1);
      std::ranges::replace(rest, '\n', ' ');
      lines = wrapped(rest, width);
    } else if (end < lines.size()) {
      out += line + '\n';
      lines.erase(0, end + 1);
    } else {
      return out + line;
    }
  }
}

std::string padded(const std::string& text, int width, bool right) {
  const std::string cut = shortened(text, width);
  const std::string blanks(static_cast<size_t>(std::max(0, width - display_width(cut))), ' ');
  return right ? blanks + cut : cut + blanks;
}

template <class Text>
void print_line(std::string& out, const Grid& grid, size_t columns, const Text& text) {
  std::string line;
  for (size_t c = 0; c < columns; ++c) {
    if (c > 0) line.append(kGap, ' ');
    line += padded(text(c), grid.widths[c], grid.right[c]);
  }
  while (!line.empty() && line.back() == ' ') line.pop_back();
  out += line + "\n";
}

/// One row, of as many lines as its longest wrapped text.
void print_row(std::string& out, const Table& table, const Grid& grid, size_t columns, const std::vector<std::string>& row) {
  std::vector<std::vector<std::string>> cells(columns);
  size_t lines = 1;
  for (size_t c = 0; c < columns; ++c) {
    const std::string text = table.columns[c].wraps ? broken(row[c], grid.widths[c]) : row[c];
    for (size_t at = 0; at <= text.size();) {
      const size_t end = std::min(text.find('\n', at), text.size());
      cells[c].push_back(text.substr(at, end - at));
      at = end + 1;
    }
    lines = std::max(lines, cells[c].size());
  }
  for (size_t line = 0; line < lines; ++line)
    print_line(out, grid, columns, [&](size_t c) { return line < cells[c].size() ? cells[c][line] : std::string(); });
}

}  // namespace

std::string_view name_of(Unit unit) {
  switch (unit) {
    case Unit::kNone: return "";
    case Unit::kBytes: return "B";
    case Unit::kSeconds: return "s";
    case Unit::kFraction: return "fraction";
    case Unit::kPercent: return "%";
    case Unit::kTokensPerSecond: return "tokens/s";
    case Unit::kBytesPerSecond: return "B/s";
    case Unit::kCount: return "count";
    case Unit::kFlops: return "flop";
    case Unit::kJoules: return "J";
    case Unit::kNats: return "nat";
  }
  return "";
}

std::optional<TableFormat> table_format_named(std::string_view name) {
  constexpr std::array<std::string_view, 4> kNames{"table", "json", "csv", "markdown"};
  for (size_t i = 0; i < kNames.size(); ++i)
    if (kNames[i] == name) return static_cast<TableFormat>(i);
  return std::nullopt;
}

std::string exact_text(const Value& value) {
  return std::visit(Overload{[](std::monostate) { return std::string(); }, [](bool v) { return std::string(v ? "true" : "false"); },
                             [](int64_t v) { return fmt::format("{}", v); }, [](double v) { return number_text(v); },
                             [](const std::string& v) { return v; }},
                    value);
}

std::string human_text(const Value& value, Unit unit) {
  if (const bool* flag = std::get_if<bool>(&value)) return *flag ? "yes" : "no";
  if (!is_number(value)) return exact_text(value);
  const int64_t* whole = std::get_if<int64_t>(&value);
  const double number = whole != nullptr ? static_cast<double>(*whole) : std::get<double>(value);
  switch (unit) {
    case Unit::kNone: return whole != nullptr ? exact_text(value) : fmt::format("{:.4g}", number);
    case Unit::kBytes: return bytes_text(whole != nullptr ? *whole : std::llround(number));
    case Unit::kSeconds: return seconds_text(number);
    case Unit::kFraction: return percent_text(number);
    case Unit::kPercent: return signed_percent_text(number);
    case Unit::kTokensPerSecond: return tokens_per_second_text(number);
    case Unit::kBytesPerSecond: return bytes_per_second_text(number);
    case Unit::kCount: return count_text(number);
    case Unit::kFlops: return flops_text(number);
    case Unit::kJoules: return fmt::format("{:.4g} J", number);
    case Unit::kNats: return fmt::format("{:.4f}", number);
  }
  return exact_text(value);
}

std::vector<std::vector<std::string>> parse_csv(std::string_view text) {
  std::vector<std::vector<std::string>> records;
  bool quoted = false, open = false;  // `open`: the record being read has a field
  for (size_t i = 0; i < text.size(); ++i) {
    if (!open) {
      records.push_back({""});
      open = true;
    }
    std::string& field = records.back().back();
    const char c = text[i];
    if (quoted) {
      if (c != '"') {
        field += c;
      } else if (i + 1 < text.size() && text[i + 1] == '"') {
        field += '"';
        ++i;
      } else {
        quoted = false;
      }
    } else if (c == '"' && field.empty()) {
      quoted = true;
    } else if (c == ',') {
      records.back().emplace_back();
    } else if (c == '\n') {
      open = false;
    } else if (c != '\r') {
      field += c;
    }
  }
  return records;
}

std::string print_aligned(const Table& table, int width) {
  Grid grid = grid_of(table);
  size_t columns = table.columns.size();
  std::string said;
  if (width > 0) {
    for (size_t c = 0; c < columns; ++c)
      if (table.columns[c].shortens && line_width(grid.widths, columns) > width)
        said += wrapped(take_common(grid, c, table.columns[c], width), width, 2);
    columns = columns_that_fit(table, grid.widths, width);
    shorten(table, grid.widths, columns, width);
  }
  std::string out = said;
  print_line(out, grid, columns, [&](size_t c) { return heading_of(table.columns[c]); });
  print_line(out, grid, columns, [&](size_t c) { return std::string(static_cast<size_t>(grid.widths[c]), '-'); });
  for (const auto& row : grid.rows) print_row(out, table, grid, columns, row);
  if (const size_t left_out = table.columns.size() - columns; left_out > 0) {
    std::string rest = fmt::format("({} more {} into {} characters:", left_out,
                                   left_out == 1 ? "column does not fit" : "columns do not fit", width);
    for (size_t c = columns; c < table.columns.size(); ++c) rest += (c == columns ? " " : ", ") + heading_of(table.columns[c]);
    out += wrapped(rest + "; --wide or --format csv shows every column)\n", width, 1);
  }
  return out;
}

Table without_empty_columns(Table table) {
  const auto empty = [](const Value& v) {
    const auto* text = std::get_if<std::string>(&v);
    return std::holds_alternative<std::monostate>(v) || (text != nullptr && text->empty());
  };
  for (size_t c = table.columns.size(); c-- > 0;) {
    if (!std::ranges::all_of(table.rows, [&](const auto& row) { return empty(row[c]); })) continue;
    table.columns.erase(table.columns.begin() + static_cast<ptrdiff_t>(c));
    for (auto& row : table.rows) row.erase(row.begin() + static_cast<ptrdiff_t>(c));
  }
  return table;
}

std::string print_csv(const Table& table) {
  std::string out;
  for (size_t c = 0; c < table.columns.size(); ++c) out += (c > 0 ? "," : "") + csv_field(table.columns[c].name);
  out += "\n";
  for (const auto& row : table.rows) add_csv_row(out, row);
  return out;
}

void add_csv_row(std::string& out, std::span<const Value> row) {
  for (size_t c = 0; c < row.size(); ++c) {
    if (c > 0) out += ',';
    add_csv_field(out, row[c]);
  }
  out += '\n';
}

void add_csv_field(std::string& out, const Value& value) {
  const auto plain = [](const std::string& text) {  // nothing that a reader of CSV or a spreadsheet takes for more than text
    return !text.empty() && std::isalnum(static_cast<unsigned char>(text[0])) != 0 &&
           std::ranges::all_of(text, [](char c) { return c >= ' ' && c < 0x7f && c != ',' && c != '"'; });
  };
  if (const auto* whole = std::get_if<int64_t>(&value)) {
    std::array<char, 32> digits;
    out.append(digits.begin(), std::to_chars(digits.begin(), digits.end(), *whole).ptr);
  } else if (const auto* real = std::get_if<double>(&value); real != nullptr && std::isfinite(*real)) {
    fmt::format_to(std::back_inserter(out), "{}", *real);  // `number_text`
  } else if (const auto* text = std::get_if<std::string>(&value); text != nullptr && plain(*text)) {
    out += *text;
  } else if (!std::holds_alternative<std::monostate>(value)) {
    out += csv_field(exact_text(value));
  }
}

std::string print_markdown(const Table& table) {
  const Grid grid = grid_of(table);
  std::string out = "|", rule = "|";
  for (size_t c = 0; c < table.columns.size(); ++c) {
    out += " " + markdown_text(heading_of(table.columns[c])) + " |";
    rule += grid.right[c] ? " ---: |" : " --- |";
  }
  out += "\n" + rule + "\n";
  for (const auto& row : grid.rows) {
    out += "|";
    for (const std::string& cell : row) out += " " + markdown_text(cell) + " |";
    out += "\n";
  }
  return out;
}

std::string print_json(const Table& table) {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const auto& row : table.rows) {
    nlohmann::ordered_json object = nlohmann::ordered_json::object();
    for (size_t c = 0; c < row.size(); ++c) object[table.columns[c].name] = json_of(row[c]);
    rows.push_back(std::move(object));
  }
  return visible(rows.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace)) + "\n";
}

std::string print_table(const Table& table, TableFormat format, int width) {
  switch (format) {
    case TableFormat::kTable: return print_aligned(table, width);
    case TableFormat::kJson: return print_json(table);
    case TableFormat::kCsv: return print_csv(table);
    case TableFormat::kMarkdown: return print_markdown(table);
  }
  return {};
}

}  // namespace shardlab::reports
