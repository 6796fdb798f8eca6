#include "plan/base/utf8.h"

#include <fmt/format.h>

#include <algorithm>

namespace shardlab {

namespace {

constexpr std::string_view kIsolate = "\u2068", kEndOfIsolate = "\u2069";

void append(std::string& out, int32_t value) {
  if (value < 0x80) {
    out += static_cast<char>(value);
  } else {  // of Latin-1, which needs two bytes
    out += static_cast<char>(0xC0 | value >> 6);
    out += static_cast<char>(0x80 | (value & 0x3F));
  }
}

/// Whether a terminal or a browser would obey the character in place of showing it.
bool commands(int32_t c) {
  return c < 0x20 || (c >= 0x7F && c < 0xA0) || c == 0x061C || c == 0x200E || c == 0x200F || (c >= 0x2028 && c <= 0x202E) ||
         (c >= 0x2066 && c <= 0x2069) || c == 0xFEFF;
}

/// Whether it is written from right to left: Hebrew, Arabic and their neighbours.
bool from_the_right(int32_t c) {
  return (c >= 0x0590 && c <= 0x08FF) || (c >= 0xFB1D && c <= 0xFDFF) || (c >= 0xFE70 && c < 0xFEFF) ||
         (c >= 0x10800 && c <= 0x10FFF) || (c >= 0x1E800 && c <= 0x1EFFF);
}

}  // namespace

CodePoint first_code_point(std::string_view text) {
  if (text.empty()) return {};
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const int first = byte(0);
  if (first < 0x80) return {first, 1};
  const int bytes = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
  if (first < 0xC2 || first > 0xF4) return {-1, 1};
  int32_t value = first & (0xFF >> (bytes + 1));
  for (int i = 1; i < bytes; ++i) {
    if (static_cast<size_t>(i) == text.size()) return {};
    if ((byte(static_cast<size_t>(i)) & 0xC0) != 0x80) return {-1, 1};
    value = value << 6 | (byte(static_cast<size_t>(i)) & 0x3F);
  }
  const int32_t least = bytes == 4 ? 0x10000 : bytes == 3 ? 0x800 : 0x80;
  if (value < least || value > 0x10FFFF || (value >= 0xD800 && value <= 0xDFFF)) return {-1, 1};
  return {value, bytes};
}

std::string place_in(std::string_view text, size_t at) {
  const std::string_view before = text.substr(0, std::min(at, text.size()));
  const auto is_character = [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; };
  const std::string_view line = before.substr(before.rfind('\n') + 1);  // npos + 1 is 0
  return fmt::format(":{}:{}", std::ranges::count(before, '\n') + 1, std::ranges::count_if(line, is_character) + 1);
}

std::string to_utf8(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const auto plain = static_cast<size_t>(std::ranges::find_if(text, [](char c) { return (c & 0x80) != 0; }) - text.begin());
    out += text.substr(0, plain);
    text.remove_prefix(plain);
    if (text.empty()) break;
    const CodePoint c = first_code_point(text);
    const size_t bytes = c.bytes == 0 ? 1 : static_cast<size_t>(c.bytes);
    if (c.bytes == 0 || c.value < 0)
      append(out, static_cast<unsigned char>(text[0]));
    else
      out += text.substr(0, bytes);
    text.remove_prefix(bytes);
  }
  return out;
}

std::string visible(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const CodePoint c = first_code_point(text);
    const size_t bytes = c.bytes == 0 ? 1 : static_cast<size_t>(c.bytes);
    if (c.bytes == 0 || c.value < 0)
      out += fmt::format("\\u{:04x}", static_cast<unsigned char>(text[0]));
    else if (commands(c.value) && c.value != '\n' && c.value != '\t')
      out += fmt::format("\\u{:04x}", static_cast<uint32_t>(c.value));
    else
      out += text.substr(0, bytes);
    text.remove_prefix(bytes);
  }
  return out;
}

std::string visible_line(std::string_view text) {
  std::string out = visible(text);
  bool turns = false;
  for (std::string_view rest = out; !rest.empty(); rest.remove_prefix(static_cast<size_t>(first_code_point(rest).bytes)))
    turns = turns || from_the_right(first_code_point(rest).value);
  for (char& c : out)
    if (c == '\n' || c == '\t') c = ' ';
  return turns ? std::string(kIsolate) + out + std::string(kEndOfIsolate) : out;
}

}  // namespace shardlab
