#include "plan/base/values.h"

#include <fmt/format.h>

#include <array>
#include <charconv>
#include <cmath>
#include <utility>

namespace shardlab {

namespace {

constexpr std::array<std::pair<std::string_view, double>, 8> kSuffixes = {{{"Ki", 1024.0},
                                                                           {"Mi", 1048576.0},
                                                                           {"Gi", 1073741824.0},
                                                                           {"Ti", 1099511627776.0},
                                                                           {"k", 1e3},
                                                                           {"M", 1e6},
                                                                           {"G", 1e9},
                                                                           {"T", 1e12}}};

/// Splits a suffix off; its factor, or 1.
double take_suffix(std::string_view& text) {
  for (const auto& [suffix, factor] : kSuffixes)
    if (text.size() > suffix.size() && text.ends_with(suffix)) {
      text.remove_suffix(suffix.size());
      return factor;
    }
  return 1;
}

std::optional<double> parse_decimal(std::string_view text) {
  if (text.starts_with('+')) text.remove_prefix(1);
  if (text.empty() || !(std::isdigit(static_cast<unsigned char>(text.back())) || text.back() == '.'))
    return std::nullopt;  // no inf, nan
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || !std::isfinite(value)) return std::nullopt;
  return value;
}

std::optional<int64_t> parse_whole(std::string_view text) {
  if (text.starts_with('+')) text.remove_prefix(1);
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

}  // namespace

std::optional<int64_t> parse_count(std::string_view text) {
  if (const auto whole = parse_whole(text)) return whole;  // exact beyond 2^53
  const std::optional<double> value = parse_number(text);
  if (!value || std::trunc(*value) != *value || std::abs(*value) >= 9.2e18) return std::nullopt;
  return static_cast<int64_t>(*value);
}

std::optional<double> parse_number(std::string_view text) {
  const double factor = take_suffix(text);
  const std::optional<double> value = parse_decimal(text);
  if (!value || !std::isfinite(*value * factor)) return std::nullopt;
  return *value * factor;
}

std::optional<double> parse_duration(std::string_view text) {
  double factor = 1;
  for (const auto& [suffix, seconds] : {std::pair<std::string_view, double>{"ms", 1e-3}, {"s", 1}, {"m", 60}, {"h", 3600}})
    if (text.size() > suffix.size() && text.ends_with(suffix)) {
      text.remove_suffix(suffix.size());
      factor = seconds;
      break;
    }
  const std::optional<double> value = parse_decimal(text);
  if (!value || *value <= 0 || !std::isfinite(*value * factor)) return std::nullopt;
  return *value * factor;
}

std::optional<bool> parse_bool(std::string_view text) {
  if (text == "true") return true;
  if (text == "false") return false;
  return std::nullopt;
}

std::string to_text(int64_t value) {
  std::array<char, 24> digits;
  return {digits.begin(), std::to_chars(digits.begin(), digits.end(), value).ptr};
}

std::string to_text(double value) {
  // Whole numbers in full: 12582912, not 1.258e+07.
  if (std::trunc(value) == value && std::abs(value) < 1e15) return to_text(static_cast<int64_t>(value));
  return fmt::format("{}", value);
}

std::string to_text(float value) {
  if (std::trunc(value) == value && std::abs(value) < 1e9f) return to_text(static_cast<int64_t>(value));
  return fmt::format("{}", value);
}

}  // namespace shardlab
