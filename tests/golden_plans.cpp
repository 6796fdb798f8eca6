#include "tests/golden_plans.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include "tests/paths.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

namespace fs = std::filesystem;

constexpr size_t kContext = 2;
constexpr std::string_view kAs = "as ", kButFor = ", but for\n";

std::vector<std::string_view> lines_of(std::string_view text) {
  std::vector<std::string_view> lines;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    lines.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return lines;
}

/// A stretch of lines of the base, [begin, end), in whose place others stand.
struct Change {
  size_t begin = 0, end = 0;
  std::vector<std::string_view> now;
};

/// By a longest common subsequence.
std::vector<Change> changes_between(const std::vector<std::string_view>& a, const std::vector<std::string_view>& b) {
  const size_t width = b.size() + 1;
  std::vector<uint32_t> common((a.size() + 1) * width);  // of what is left from line i of a and line j of b on
  for (size_t i = a.size(); i-- > 0;)
    for (size_t j = b.size(); j-- > 0;)
      common[i * width + j] =
          a[i] == b[j] ? common[(i + 1) * width + j + 1] + 1 : std::max(common[(i + 1) * width + j], common[i * width + j + 1]);
  std::vector<Change> changes;
  bool open = false;
  for (size_t i = 0, j = 0; i < a.size() || j < b.size();) {
    if (i < a.size() && j < b.size() && a[i] == b[j]) {
      ++i, ++j, open = false;
      continue;
    }
    if (!open) changes.push_back({i, i, {}});
    open = true;
    if (j == b.size() || (i < a.size() && common[(i + 1) * width + j] >= common[i * width + j + 1]))
      changes.back().end = ++i;
    else
      changes.back().now.push_back(b[j++]);
  }
  return changes;
}

/// A hunk's lines with their marks, and where in the base it begins and ends.
struct Hunk {
  size_t begin = 0, end = 0;
  std::vector<Change> changes;
};

/// The first place from `from` on where the base has the hunk's old lines.
size_t place_of(const std::vector<std::string_view>& base, const std::vector<std::string_view>& old, size_t from) {
  for (size_t at = from; at + old.size() <= base.size(); ++at)
    if (std::equal(old.begin(), old.end(), base.begin() + static_cast<std::ptrdiff_t>(at))) return at;
  return base.size() + 1;
}

/// Changes that are near one another, with the context that tells their place.
std::vector<Hunk> hunks_of(const std::vector<std::string_view>& base, std::vector<Change> changes) {
  std::vector<Hunk> hunks;
  for (Change& change : changes) {
    const size_t begin = change.begin - std::min(change.begin, kContext), end = std::min(change.end + kContext, base.size());
    if (hunks.empty() || begin > hunks.back().end) hunks.push_back({begin, end, {}});
    hunks.back().end = end;
    hunks.back().changes.push_back(std::move(change));
  }
  size_t from = 0;
  for (Hunk& hunk : hunks) {
    const auto old = [&] {
      return std::vector<std::string_view>(base.begin() + static_cast<std::ptrdiff_t>(hunk.begin),
                                           base.begin() + static_cast<std::ptrdiff_t>(hunk.end));
    };
    while (hunk.begin > from && place_of(base, old(), from) != hunk.begin) --hunk.begin;
    from = hunk.end;
  }
  return hunks;
}

/// The segment or role that a line of a plan is of.
std::string_view heading_of(const std::vector<std::string_view>& base, size_t line) {
  for (size_t i = std::min(line + 1, base.size()); i-- > 0;)
    if (base[i].starts_with("segment ") || base[i].starts_with("role ")) return base[i];
  return "";
}

std::string text_of(const fs::path& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

fs::path folder() { return fs::path(source_dir()) / "tests/golden/plans"; }

/// The first line of a difference, and the rest.
std::pair<std::string, std::string> base_and_rest(const std::string& text) {
  const size_t end = text.find(kButFor);
  if (!text.starts_with(kAs) || end == std::string::npos) return {};
  return {text.substr(kAs.size(), end - kAs.size()), text.substr(end + kButFor.size())};
}

bool updating() {
  const char* update = std::getenv("SHARDLAB_UPDATE_GOLDEN");
  return update != nullptr && std::string(update) == "1";
}

}  // namespace

std::string text_difference(std::string_view base_text, std::string_view text) {
  const std::vector<std::string_view> base = lines_of(base_text);
  std::string difference;
  for (const Hunk& hunk : hunks_of(base, changes_between(base, lines_of(text)))) {
    const std::string_view heading = heading_of(base, hunk.changes.front().begin - std::min<size_t>(hunk.changes.front().begin, 1));
    difference += fmt::format("@@{}{}\n", heading.empty() ? "" : " ", heading);
    size_t at = hunk.begin;
    const auto put = [&](char mark, std::string_view line) { difference += fmt::format("{}{}\n", mark, line); };
    for (const Change& change : hunk.changes) {
      for (; at < change.begin; ++at) put(' ', base[at]);
      for (; at < change.end; ++at) put('-', base[at]);
      for (const std::string_view line : change.now) put('+', line);
    }
    for (; at < hunk.end; ++at) put(' ', base[at]);
  }
  return difference;
}

std::string with_difference(std::string_view base_text, std::string_view difference) {
  const std::vector<std::string_view> base = lines_of(base_text), lines = lines_of(difference);
  std::string text;
  const auto put = [&](std::string_view line) { text += fmt::format("{}\n", line); };
  size_t at = 0;
  for (size_t i = 0; i < lines.size();) {
    std::vector<std::string_view> old;
    size_t end = ++i;  // behind the line with "@@"
    for (; end < lines.size() && !lines[end].starts_with("@@"); ++end)
      if (lines[end].front() != '+') old.push_back(lines[end].substr(1));
    const size_t place = place_of(base, old, at);
    if (place > base.size()) return "";
    for (; at < place; ++at) put(base[at]);
    for (; i < end; ++i)
      if (lines[i].front() != '-') put(lines[i].substr(1));
    at += old.size();
  }
  for (; at < base.size(); ++at) put(base[at]);
  return text;
}

std::vector<std::string> golden_plan_names() {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder())) names.insert(entry.path().stem().string());
  return {names.begin(), names.end()};
}

std::string golden_plan(const std::string& name) {
  if (const fs::path whole = folder() / (name + ".plan"); fs::exists(whole)) return text_of(whole);
  const auto [base, difference] = base_and_rest(text_of(folder() / (name + ".diff")));
  return base.empty() ? "" : with_difference(golden_plan(base), difference);
}

std::string golden_plans_difference(const std::vector<NamedText>& texts, const std::vector<std::string>& whole) {
  std::string wrong;
  const auto compare = [&](const std::string& file, const std::string& text) {
    if (const std::string found = golden_difference("plans/" + file, text); !found.empty()) wrong += found + "\n";
  };
  std::map<std::string, std::string_view> earlier;
  std::set<std::string> files;
  for (const NamedText& t : texts) {
    std::string base, difference;
    if (std::ranges::find(whole, t.name) == whole.end()) {
      if (updating()) {
        size_t least = t.text.size() * 9 / 10;
        for (const auto& [name, text] : earlier)
          if (std::string found = text_difference(text, t.text); found.size() < least)
            least = found.size(), base = name, difference = std::move(found);
      } else if (base = base_and_rest(text_of(folder() / (t.name + ".diff"))).first; earlier.contains(base)) {
        difference = text_difference(earlier.at(base), t.text);
      }
    }
    const bool differs = earlier.contains(base);
    files.insert(t.name + (differs ? ".diff" : ".plan"));
    if (differs && with_difference(earlier.at(base), difference) != t.text)
      wrong += fmt::format("{}.diff does not give the plan back\n", t.name);
    compare(*files.find(t.name + (differs ? ".diff" : ".plan")),
            differs ? fmt::format("{}{}{}{}", kAs, base, kButFor, difference) : t.text);
    earlier[t.name] = t.text;
  }
  for (const auto& entry : fs::directory_iterator(folder()))
    if (const std::string file = entry.path().filename().string(); !files.contains(file)) {
      if (updating())
        fs::remove(entry.path());
      else
        wrong += fmt::format("{} is a file of no golden plan\n", entry.path().string());
    }
  return wrong;
}

}  // namespace shardlab::testing
