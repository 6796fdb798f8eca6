#include "reports/escape.h"

#include <algorithm>
#include <cctype>
#include <charconv>

#include "plan/base/utf8.h"

namespace shardlab::reports {

namespace {

/// Whether a spreadsheet computes the field: a text that begins as a formula does.
bool computes(std::string_view text) {
  if (text.empty() || std::string_view("=+-@\t").find(text[0]) == std::string_view::npos) return false;
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return end != text.data() + text.size() || (error != std::errc() && error != std::errc::result_out_of_range);
}

}  // namespace

std::string csv_field(std::string_view text) {
  const std::string shown = (computes(text) ? "'" : "") + visible(text);
  if (shown.find_first_of(",\"\r\n") == std::string::npos) return shown;
  std::string out = "\"";
  for (const char c : shown) {
    if (c == '"') out += '"';
    out += c;
  }
  return out + "\"";
}

std::string markdown_text(std::string_view text) {
  std::string out;
  const std::string line = visible_line(text);
  for (size_t i = 0; i < line.size(); ++i) {
    const char c = line[i];
    switch (c) {
      // Only what could be read as a character reference.
      case '&':
        out += i + 1 < line.size() && (line[i + 1] == '#' || std::isalpha(static_cast<unsigned char>(line[i + 1]))) ? "&amp;" : "&";
        break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '\\':
      case '|':
      case '*':
      case '[':
      case ']': out += '\\'; [[fallthrough]];
      default: out += c;
    }
  }
  return out;
}

std::string markdown_code(std::string_view text) {
  const std::string line = visible_line(text);
  size_t longest = 0, run = 0;
  for (const char c : line) longest = std::max(longest, run = c == '`' ? run + 1 : 0);
  const std::string fence(longest + 1, '`'), blank = longest > 0 ? " " : "";
  return fence + blank + line + blank + fence;
}

std::string html_escaped(std::string_view text) {
  std::string out;
  for (const char c : visible(text)) {
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '"': out += "&quot;"; break;
      case '\'': out += "&#39;"; break;
      default: out += c;
    }
  }
  return out;
}

std::string script_safe(std::string_view json) {
  std::string out;
  for (const char c : visible(json)) {
    if (c == '<')
      out += "\\u003c";
    else
      out += c;
  }
  return out;
}

}  // namespace shardlab::reports
