#include "answers/words.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <limits>

#include "answers/namespaces.h"
#include "plan/base/values.h"

namespace shardlab::answers {
namespace {

constexpr const char* kForms = "whole numbers separated by commas, or a range: 1..8, '<=8', '>=2'";

/// Both ends are in the range.
struct Range {
  int64_t least = std::numeric_limits<int64_t>::min(), most = std::numeric_limits<int64_t>::max();
};

std::optional<Range> range_of(std::string_view text) {
  Range range;
  if (const size_t dots = text.find(".."); dots != std::string_view::npos) {
    const std::string_view low = text.substr(0, dots), high = text.substr(dots + 2);
    const auto least = parse_count(low), most = parse_count(high);
    if ((!low.empty() && !least) || (!high.empty() && !most) || (low.empty() && high.empty())) return std::nullopt;
    if (least) range.least = *least;
    if (most) range.most = *most;
    return range;
  }
  const bool below = text.front() == '<', with_end = text.size() > 1 && text[1] == '=';
  const auto end = parse_count(text.substr(with_end ? 2 : 1));
  if (!end) return std::nullopt;
  if (below)
    range.most = with_end ? *end : *end - 1;
  else
    range.least = with_end ? *end : *end + 1;
  return range;
}

}  // namespace

std::vector<std::string> split(std::string_view text, char at) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(at, begin), text.size());
    parts.emplace_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

bool is_range(std::string_view text) {
  return !text.empty() && (text.front() == '<' || text.front() == '>' || text.find("..") != std::string_view::npos);
}

Result<std::vector<int64_t>> numbers_of(std::string_view key, std::string_view text, std::span<const int64_t> sensible) {
  std::vector<int64_t> values;
  for (const std::string& word : split(text, ',')) {
    if (!is_range(word)) {
      const auto value = parse_count(word);
      if (!value) return refusal(fmt::format("{} `{}` is not a number", key, word), kForms);
      values.push_back(*value);
      continue;
    }
    const auto range = range_of(word);
    if (!range) return refusal(fmt::format("{} `{}` is not a range of numbers", key, word), kForms);
    const size_t before = values.size();
    for (const int64_t v : sensible)
      if (v >= range->least && v <= range->most) values.push_back(v);
    if (values.size() == before)
      return refusal(fmt::format("{} `{}` holds no possible value", key, word),
                     fmt::format("possible: {}", fmt::join(sensible, ", ")));
  }
  std::vector<int64_t> once;
  for (const int64_t v : values)
    if (std::ranges::find(once, v) == once.end()) once.push_back(v);
  return once;
}

std::optional<double> parse_tokens(std::string_view text) {
  const bool billions = text.ends_with('B');
  if (billions) text.remove_suffix(1);
  const auto number = parse_number(text);
  if (!number || *number <= 0 || (billions && !std::isdigit(static_cast<unsigned char>(text.back())))) return std::nullopt;
  return billions ? *number * 1e9 : *number;
}

std::string shell_word(const std::string& word) {
  constexpr std::string_view kHarmless = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=./,:@%";
  if (!word.empty() && word.find_first_not_of(kHarmless) == std::string::npos) return word;
  std::string quoted = "'";
  for (const char c : word) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

}  // namespace shardlab::answers
