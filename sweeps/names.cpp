#include "sweeps/names.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>

#include "plan/base/nearest.h"

namespace shardlab::sweeps {
namespace {

/// Words of a name in lower case. A point between digits is part of its word: "llama-3.1-8b" is llama, 3.1, 8b.
std::vector<std::string> words_of(std::string_view name) {
  const auto is = [&](size_t at, int (*kind)(int)) { return at < name.size() && kind(static_cast<unsigned char>(name[at])) != 0; };
  std::vector<std::string> words;
  bool open = false;
  for (size_t i = 0; i < name.size(); ++i) {
    const bool point = name[i] == '.' && i > 0 && is(i - 1, std::isdigit) && is(i + 1, std::isdigit);
    if (!is(i, std::isalnum) && !point) {
      open = false;
      continue;
    }
    if (!open) words.emplace_back();
    open = true;
    words.back() += static_cast<char>(std::tolower(static_cast<unsigned char>(name[i])));
  }
  return words;
}

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words)
    for (const char c : word)
      if (c != '.') text += c;
  return text;
}

bool has(const std::vector<std::string>& words, const std::string& word) { return std::ranges::find(words, word) != words.end(); }

}  // namespace

Result<std::string> name_meant(const std::string& said, const std::vector<std::string>& names, std::span<const Alias> aliases) {
  if (has(names, said)) return said;
  constexpr std::array<std::string_view, 7> kIdle{"instruct", "base", "hf", "it", "pt", "chat", "meta"};
  std::vector<std::string> words = words_of(said);
  for (const Alias& alias : aliases)
    if (joined(words_of(alias.first)) == joined(words)) return std::string(alias.second);
  const auto same = [&] {
    return std::ranges::find(names, joined(words), [](const std::string& n) { return joined(words_of(n)); });
  };
  if (const auto found = same(); found != names.end()) return *found;
  std::erase_if(words, [&](const std::string& word) { return std::ranges::find(kIdle, word) != kIdle.end(); });
  if (const auto found = same(); found != names.end()) return *found;
  std::vector<std::string> candidates;
  const std::string letters = joined(words);
  if (!letters.empty()) {
    std::ranges::copy_if(names, std::back_inserter(candidates), [&](const std::string& name) {
      const std::vector<std::string> of_name = words_of(name);
      return std::ranges::all_of(words, [&](const std::string& word) { return has(of_name, word); });
    });
    if (candidates.empty())
      std::ranges::copy_if(names, std::back_inserter(candidates),
                           [&](const std::string& name) { return joined(words_of(name)).find(letters) != std::string::npos; });
  }
  if (candidates.size() == 1) return candidates.front();
  constexpr size_t kMost = 8;  // more are no answer
  if (candidates.size() > kMost) candidates.clear();
  std::string close = nearest(said, names);
  if (close.empty()) {
    std::vector<std::string> spellings;
    for (const Alias& alias : aliases) spellings.emplace_back(alias.first);
    close = nearest(said, spellings);
  }
  return Error{ExitCode::kUsage,
               fmt::format("named `{}`{}", said,
                           !candidates.empty() ? fmt::format(", did you mean `{}`?", fmt::join(candidates, "` or `"))
                           : close.empty()     ? ""
                                               : fmt::format(", did you mean `{}`?", close)),
               {},
               {}};
}

}  // namespace shardlab::sweeps
