#include "interop/toml.h"

#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <set>

#include "plan/base/utf8.h"

namespace shardlab::interop {

namespace {

constexpr int kDepth = 16;

bool is_bare(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-'; }

/// Reads front to back; the first thing wrong ends it.
class Reader {
 public:
  Reader(std::string_view text, const std::string& name) : text_(text), name_(name) {}

  Result<std::vector<TomlEntry>> read() {
    std::vector<TomlEntry> entries;
    std::set<std::string> seen, tables;
    std::string table;
    for (skip_blank_lines(); !at_end(); skip_blank_lines()) {
      const size_t begin = at_;
      if (peek() == '[') {
        ++at_;
        if (peek() == '[') return fail("arrays of tables are not read");
        std::string path;
        if (!read_key(path)) return fail("a table's name is expected");
        skip_blanks();
        if (!take(']')) return fail(fmt::format("`]` is expected after `[{}`", path));
        if (!tables.insert(path).second) return fail(fmt::format("table `{}` is there twice", path), begin);
        table = path + ".";
      } else {
        const int line = line_;
        std::string path;
        if (!read_key(path)) return fail("a key is expected");
        skip_blanks();
        if (!take('=')) return fail(fmt::format("`=` is expected after `{}`", path));
        skip_blanks();
        const size_t value_begin = at_;
        TomlValue value;
        if (!read_value(value, 0))
          return fail(problem_.empty() ? fmt::format("`{}` has no value that is read", path) : problem_, value_begin);
        path.insert(0, table);
        if (!seen.insert(path).second) return fail(fmt::format("`{}` is set twice", path), begin);
        entries.push_back({std::move(path), std::move(value), line});
      }
      skip_blanks();
      if (!at_end() && peek() == '#') skip_comment();
      if (!at_end() && peek() != '\n') return fail("the line goes on where it should end");
    }
    return entries;
  }

 private:
  bool at_end() const { return at_ >= text_.size(); }
  char peek() const { return at_end() ? '\0' : text_[at_]; }
  bool take(char c) {
    if (peek() != c || at_end()) return false;
    ++at_;
    return true;
  }
  void skip_blanks() {
    while (!at_end() && (peek() == ' ' || peek() == '\t' || peek() == '\r')) ++at_;
  }
  void skip_comment() {
    while (!at_end() && peek() != '\n') ++at_;
  }
  void skip_blank_lines() {
    for (;;) {
      skip_blanks();
      if (!at_end() && peek() == '#') skip_comment();
      if (at_end() || peek() != '\n') return;
      ++at_, ++line_;
    }
  }
  Error fail(std::string_view why) const { return fail(why, at_); }
  Error fail(std::string_view why, size_t at) const {
    return {ExitCode::kUsage, std::string(why), "correct the TOML at this place; a configuration of torchtitan is expected",
            name_ + place_in(text_, at)};
  }

  /// "a.b", "a . 'b'": joined by dots.
  bool read_key(std::string& path) {
    do {
      skip_blanks();
      std::string part;
      if (peek() == '"' || peek() == '\'') {
        if (!read_string(part)) return false;
      } else {
        while (!at_end() && is_bare(peek())) part += text_[at_++];
        if (part.empty()) return false;
      }
      path += (path.empty() ? "" : ".") + part;
      skip_blanks();
    } while (take('.'));
    return true;
  }

  bool read_string(std::string& out) {
    const char quote = text_[at_++];
    for (; !at_end() && peek() != quote; ++at_) {
      char c = peek();
      if (c == '\n') return false;
      if (c == '\\' && quote == '"') {
        ++at_;
        switch (peek()) {
          case 'n': c = '\n'; break;
          case 't': c = '\t'; break;
          case '"':
          case '\\': c = peek(); break;
          default: problem_ = "this escape is not read"; return false;
        }
      }
      out += c;
    }
    return take(quote);
  }

  bool read_value(TomlValue& value, int depth) {
    skip_blanks();
    if (peek() == '"' || peek() == '\'') {
      const char quote = peek();
      if (text_.substr(at_, 3) == std::string(3, quote)) return problem_ = "strings of several lines are not read", false;
      std::string text;
      if (!read_string(text)) return false;
      value.value = std::move(text);
      return true;
    }
    if (peek() == '[') return read_list(value, depth);
    if (peek() == '{') return problem_ = "inline tables are not read", false;
    return read_number(value);
  }

  bool read_list(TomlValue& value, int depth) {
    if (depth >= kDepth) return problem_ = fmt::format("lists are nested deeper than {}", kDepth), false;
    ++at_;
    TomlValue::List list;
    for (skip_blank_lines(); !take(']'); skip_blank_lines()) {
      if (at_end()) return problem_ = "a list does not end", false;
      TomlValue item;
      if (!read_value(item, depth + 1)) return false;
      list.push_back(std::move(item));
      skip_blank_lines();
      if (!take(',') && peek() != ']') return problem_ = "`,` or `]` is expected in a list", false;
    }
    value.value = std::move(list);
    return true;
  }

  bool read_number(TomlValue& value) {
    std::string word;
    while (!at_end() && (is_bare(peek()) || peek() == '.' || peek() == '+')) {
      if (peek() != '_') word += peek();
      ++at_;
    }
    if (word == "true" || word == "false") return value.value = word == "true", true;
    std::string_view digits = word;
    if (digits.starts_with('+')) digits.remove_prefix(1);
    if (digits == "inf") return value.value = HUGE_VAL, true;
    int64_t whole = 0;
    const auto read_whole = std::from_chars(digits.data(), digits.data() + digits.size(), whole);
    if (!digits.empty() && read_whole.ec == std::errc{} && read_whole.ptr == digits.data() + digits.size())
      return value.value = whole, true;
    double real = 0;
    const auto read_real = std::from_chars(digits.data(), digits.data() + digits.size(), real);
    if (digits.empty() || read_real.ec != std::errc{} || read_real.ptr != digits.data() + digits.size() || !std::isfinite(real))
      return problem_ = fmt::format("`{}` is not a value", word), false;
    value.value = real;
    return true;
  }

  std::string_view text_;
  const std::string& name_;
  std::string problem_;
  size_t at_ = 0;
  int line_ = 1;
};

}  // namespace

Result<std::vector<TomlEntry>> parse_toml(std::string_view text, const std::string& name) { return Reader(text, name).read(); }

}  // namespace shardlab::interop
