// Words of the command line that stand for several values, and values back as words that a shell takes.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "answers/namespaces.h"
#include "plan/base/result.h"

namespace shardlab::answers {

/// Parts of a text between a sign; an empty text is one empty part.
std::vector<std::string> split(std::string_view text, char at);

/// Whether a text is a range: "1..8", "<=8", "<8", ">=2", ">2".
bool is_range(std::string_view text);

/// Whole numbers of the flag `key`: "4", "1,2,8", or ranges, each of which stands for those of `sensible` (ascending) that lie in
/// it. A number that is named is taken as it is. Refuses what is no number, and a range without any.
Result<std::vector<int64_t>> numbers_of(std::string_view key, std::string_view text, std::span<const int64_t> sensible);

/// How many tokens a run has: a number above 0, whose suffix may be B for billions as well ("300B", "1.4T").
std::optional<double> parse_tokens(std::string_view text);

/// A word as a shell takes it: quoted where it holds more than harmless characters.
std::string shell_word(const std::string& word);

}  // namespace shardlab::answers
