#include "simulator/estimator/validate/csv.h"

#include <fmt/format.h>

#include <algorithm>

#include "plan/base/limits.h"

namespace shardlab::simulator {
namespace {

/// How many errors a message holds; the rest are counted.
constexpr size_t kMostErrors = 20;

class CsvReader {
 public:
  CsvReader(std::string_view text, const std::string& file) : text_(text), file_(file) {}

  Result<CsvTable> read() {
    if (text_.starts_with("\xEF\xBB\xBF")) at_ = 3;
    CsvTable table;
    while (at_ < text_.size()) {
      std::vector<CsvField> record = read_record();
      if (unclosed_) break;  // how many fields there were to be is not known
      if (record.size() == 1 && record[0].text.empty()) continue;
      if (table.columns.empty())
        read_header(record, table);
      else
        add_record(std::move(record), table);
    }
    if (errors_.empty() && table.columns.empty())
      errors_.push_back({ExitCode::kUsage, "the file is empty",
                         "write a header line with the names of the columns, then one line for each measured run", file_});
    else if (errors_.empty() && table.records.empty())
      refuse(line_, 1, "the file has a header but no rows", "write one measured run per line");
    if (errors_.empty()) return table;
    return error();
  }

 private:
  void read_header(const std::vector<CsvField>& record, CsvTable& table) {
    if (record.size() > limits::kRowsColumns) {
      refuse(record.front().line, 1, fmt::format("{} columns, more than {}", record.size(), limits::kRowsColumns),
             "write one column for each property of a run");
      at_ = text_.size();
      return;
    }
    for (const CsvField& field : record) {
      if (field.text.empty())
        refuse(field.line, field.column, fmt::format("column {} has no name", table.columns.size() + 1), "name it, or remove it");
      else if (table.column(field.text) >= 0)
        refuse(field.line, field.column, fmt::format("column `{}` appears twice", field.text), "remove one of them");
      table.columns.push_back(field.text);
    }
  }

  void add_record(std::vector<CsvField> record, CsvTable& table) {
    if (record.size() == table.columns.size()) {
      table.records.push_back(std::move(record));
      return;
    }
    const CsvField& last = record.back();
    refuse(last.line, last.column,
           fmt::format("the row has {} {}, the header has {}", record.size(), record.size() == 1 ? "field" : "fields",
                       table.columns.size()),
           "give the row one field for each column; write a field with a comma in quotes");
  }

  std::vector<CsvField> read_record() {
    std::vector<CsvField> record;
    while (true) {
      record.push_back(read_field());
      if (at_ >= text_.size()) return record;
      const char end = text_[at_];
      step();
      if (end == '\n') return record;
    }
  }

  /// Leaves `at_` on the comma or line end behind the field.
  CsvField read_field() {
    CsvField field{{}, line_, column_};
    if (at_ < text_.size() && text_[at_] == '"') {
      read_quoted(field);
      while (at_ < text_.size() && !at_end_of_field()) {
        refuse(line_, column_, "text after the closing quote of a field", "double the quotes that belong to the field");
        skip_field();
      }
      skip_carriage_return();
      return field;
    }
    while (at_ < text_.size() && !at_end_of_field()) {
      if (text_[at_] == '"') {
        refuse(line_, column_, "a quote inside a field that does not begin with one",
               "write the whole field in quotes, and double those in it");
        skip_field();
        break;
      }
      field.text += text_[at_];
      step();
    }
    skip_carriage_return();
    trim(field.text);
    return field;
  }

  void read_quoted(CsvField& field) {
    step();
    while (at_ < text_.size()) {
      const char c = text_[at_];
      step();
      if (c != '"') {
        field.text += c;
      } else if (at_ < text_.size() && text_[at_] == '"') {
        field.text += '"';
        step();
      } else {
        return;
      }
    }
    unclosed_ = true;
    refuse(field.line, field.column, "the quote that opens here is never closed", "add the closing quote");
  }

  bool at_end_of_field() const {
    return text_[at_] == ',' || text_[at_] == '\n' || (text_[at_] == '\r' && (at_ + 1 == text_.size() || text_[at_ + 1] == '\n'));
  }
  void skip_field() {
    while (at_ < text_.size() && !at_end_of_field()) step();
  }
  void skip_carriage_return() {
    if (at_ < text_.size() && text_[at_] == '\r') step();
  }
  void step() {
    if (text_[at_] == '\n') {
      ++line_;
      column_ = 1;
    } else {
      ++column_;
    }
    ++at_;
  }
  static void trim(std::string& text) {
    const auto blank = [](char c) { return c == ' ' || c == '\t'; };
    text.erase(text.begin(), std::find_if_not(text.begin(), text.end(), blank));
    while (!text.empty() && blank(text.back())) text.pop_back();
  }

  void refuse(int line, int column, const std::string& message, const std::string& hint) {
    if (errors_.size() >= kMostErrors) {
      ++untold_;
      return;
    }
    errors_.push_back({ExitCode::kUsage, message, hint, fmt::format("{}:{}:{}", file_, line, column)});
  }

  Error error() const {
    Error all = errors_.front();
    for (size_t i = 1; i < errors_.size(); ++i) all.hint += "\n" + to_string(errors_[i]);
    if (untold_ > 0) all.hint += fmt::format("\n... and {} more", untold_);
    return all;
  }

  std::string_view text_;
  std::string file_;
  size_t at_ = 0;
  int line_ = 1, column_ = 1;
  bool unclosed_ = false;  ///< the text ended within quotes
  std::vector<Error> errors_;
  int64_t untold_ = 0;
};

}  // namespace

int CsvTable::column(std::string_view name) const {
  const auto found = std::find(columns.begin(), columns.end(), name);
  return found == columns.end() ? -1 : static_cast<int>(found - columns.begin());
}

Result<CsvTable> read_csv(std::string_view text, const std::string& file) { return CsvReader(text, file).read(); }

}  // namespace shardlab::simulator
