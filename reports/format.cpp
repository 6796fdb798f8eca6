#include "reports/format.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <span>

namespace shardlab::reports {

namespace {

struct Scale {
  double size;
  std::string_view name;
};

/// Four significant digits of a value whose magnitude is below 10,000; `fewer` digits less.
std::string four_digits(double value, int fewer = 0) {
  const double magnitude = std::abs(value), rounds = std::pow(10.0, fewer);
  const int decimals = magnitude >= 1000 - 0.05 * rounds   ? 0
                       : magnitude >= 100 - 0.005 * rounds ? 1
                       : magnitude >= 10 - 0.0005 * rounds ? 2
                                                           : 3;
  return fmt::format("{:.{}f}", value, std::max(0, decimals - fewer));
}

/// `value` in the largest of `scales` (largest first) that leaves it at least 1, else in the smallest.
std::string scaled(double value, std::span<const Scale> scales, int fewer = 0) {
  if (!std::isfinite(value)) return number_text(value);
  for (const Scale& s : scales)
    if (std::abs(value) >= s.size || &s == &scales.back()) return fmt::format("{} {}", four_digits(value / s.size, fewer), s.name);
  return {};
}

constexpr std::array<Scale, 5> kByteScales{{{1024.0 * 1024 * 1024 * 1024 * 1024, "PiB"},
                                            {1024.0 * 1024 * 1024 * 1024, "TiB"},
                                            {1024.0 * 1024 * 1024, "GiB"},
                                            {1024.0 * 1024, "MiB"},
                                            {1024, "KiB"}}};
constexpr std::array<Scale, 4> kSecondScales{{{1, "s"}, {1e-3, "ms"}, {1e-6, "us"}, {1e-9, "ns"}}};
constexpr std::array<Scale, 6> kCountScales{{{1e18, "E"}, {1e15, "P"}, {1e12, "T"}, {1e9, "G"}, {1e6, "M"}, {1e3, "k"}}};

}  // namespace

std::string number_text(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  return fmt::format("{}", value);
}

std::string bytes_text(int64_t bytes) {
  if (std::abs(static_cast<double>(bytes)) < 1024) return fmt::format("{} B", bytes);
  return scaled(static_cast<double>(bytes), kByteScales);
}

std::string seconds_text(double seconds) {
  if (seconds == 0) return "0 s";
  return scaled(seconds, kSecondScales);
}

std::string count_text(double count) {
  if (!std::isfinite(count)) return number_text(count);
  if (std::abs(count) < 1000) return count == std::floor(count) ? fmt::format("{:.0f}", count) : four_digits(count);
  return scaled(count, kCountScales);
}

std::string flops_text(double flops) {
  const std::string text = count_text(flops);
  return text.find(' ') == std::string::npos ? text + " flop" : text + "flop";
}

std::string tokens_per_second_text(double tokens_per_s) {
  const std::string text = count_text(tokens_per_s);
  return text + " tok/s";
}

std::string bytes_per_second_text(double bytes_per_s) {
  const std::string text = count_text(bytes_per_s);
  return text.find(' ') == std::string::npos ? text + " B/s" : text + "B/s";
}

std::string percent_text(double fraction) {
  return std::isfinite(fraction) ? fmt::format("{:.2f} %", fraction * 100) : number_text(fraction);
}

std::string signed_percent_text(double percent) {
  if (std::abs(percent) < 0.005) return "0.00 %";
  return std::isfinite(percent) ? fmt::format("{:+.2f} %", percent) : number_text(percent);
}

std::string brief_bytes(int64_t bytes) {
  if (std::abs(static_cast<double>(bytes)) < 1024) return bytes_text(bytes);
  return scaled(static_cast<double>(bytes), kByteScales, 1);
}

std::string brief_seconds(double seconds) { return seconds == 0 ? "0 s" : scaled(seconds, kSecondScales, 1); }

std::string brief_count(double count) {
  if (!std::isfinite(count)) return number_text(count);
  if (std::abs(count) < 1000) return count == std::floor(count) ? fmt::format("{:.0f}", count) : four_digits(count, 1);
  return scaled(count, kCountScales, 1);
}

std::string count_words(double count) {
  constexpr std::array<Scale, 3> kWords{{{1e12, "trillion"}, {1e9, "billion"}, {1e6, "million"}}};
  return std::abs(count) < 1e6 ? fmt::format("{:.0f}", count) : scaled(count, kWords, 1);
}

std::string money_text(double usd) {
  if (!std::isfinite(usd)) return "$" + number_text(usd);
  constexpr std::array<Scale, 4> kMoney{{{1e12, "T"}, {1e9, "B"}, {1e6, "M"}, {1e3, "k"}}};
  for (const Scale& s : kMoney)
    if (usd >= 0.9995 * s.size) return fmt::format("${}{}", four_digits(usd / s.size, 1), s.name);
  return usd >= 10 ? fmt::format("${:.0f}", usd) : fmt::format("${:.2f}", usd);
}

std::string brief_percent(double fraction) {
  return std::isfinite(fraction) ? fmt::format("{:.0f} %", fraction * 100) : number_text(fraction);
}

namespace {

/// The end of the word at `at`; a number and its unit are one word: "6.6 %", "169.5 ms".
size_t end_of_word(std::string_view text, size_t at) {
  constexpr std::array<std::string_view, 16> kUnits{"%",   "s",   "ms",  "us",   "ns", "B", "KiB", "MiB",
                                                    "GiB", "TiB", "PiB", "GB/s", "k",  "M", "G",   "T"};
  const auto end_at = [&](size_t from) {
    const size_t end = text.find_first_of(" \n", from);
    return end == std::string_view::npos ? text.size() : end;
  };
  const size_t end = end_at(at);
  if (end == at || text[end - 1] < '0' || text[end - 1] > '9' || end >= text.size() || text[end] != ' ') return end;
  const size_t after = end_at(end + 1);
  std::string_view unit = text.substr(end + 1, after - end - 1);
  while (!unit.empty() && std::string_view(".,;:)").find(unit.back()) != std::string_view::npos) unit.remove_suffix(1);
  return std::ranges::find(kUnits, unit) == kUnits.end() ? end : after;
}

}  // namespace

std::string wrapped(std::string_view text, int width, int indent) {
  std::string out;
  int column = 0;
  bool first = true;  // word of its line
  for (size_t at = 0; at < text.size();) {
    if (text[at] == '\n') {
      out += '\n', ++at, column = 0, first = true;
      continue;
    }
    size_t end = at;
    while (end < text.size() && text[end] == ' ') ++end;
    const size_t word = end;
    end = end_of_word(text, word);
    const int blanks = static_cast<int>(word - at), letters = display_width(text.substr(word, end - word));
    if (width > 0 && !first && letters > 0 && column + blanks + letters > width) {
      out += '\n' + std::string(static_cast<size_t>(indent), ' ');
      column = indent;
    } else {
      out.append(text.substr(at, word - at)), column += blanks;
    }
    out.append(text.substr(word, end - word)), column += letters;
    first = false, at = end;
  }
  return out;
}

namespace {

constexpr std::string_view kIsolate = "\u2068", kEndOfIsolate = "\u2069";

}  // namespace

int display_width(std::string_view text) {
  int width = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const std::string_view rest = text.substr(i);
    if (rest.starts_with(kIsolate) || rest.starts_with(kEndOfIsolate)) --width;
    width += (static_cast<unsigned char>(text[i]) & 0xC0) != 0x80;  // continuation bytes take no column
  }
  return width;
}

std::string shortened(std::string_view text, int width) {
  if (display_width(text) <= width) return std::string(text);
  if (width <= 0) return {};
  if (text.starts_with(kIsolate) && text.ends_with(kEndOfIsolate)) {
    const std::string_view inside = text.substr(kIsolate.size(), text.size() - kIsolate.size() - kEndOfIsolate.size());
    return std::string(kIsolate) + shortened(inside, width) + std::string(kEndOfIsolate);
  }
  std::string out;
  int taken = 0;
  for (size_t i = 0; i < text.size();) {
    size_t next = i + 1;
    while (next < text.size() && (static_cast<unsigned char>(text[next]) & 0xC0) == 0x80) ++next;
    if (++taken >= width) break;
    out.append(text.substr(i, next - i));
    i = next;
  }
  return out + "…";
}

}  // namespace shardlab::reports
