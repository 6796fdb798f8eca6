#include "plan/base/nearest.h"

#include <algorithm>
#include <array>
#include <numeric>

namespace shardlab {

namespace {

constexpr size_t kSpelled = 64;  ///< a longer word is nobody's slip of the finger

/// Edits (insert, delete, replace, swap of neighbours) from a to b: the restricted Damerau-Levenshtein distance, or `most` where it
/// is no less. `a` has at most kSpelled characters.
int edits(std::string_view a, std::string_view b, int most) {
  const size_t longer = std::max(a.size(), b.size()), shorter = std::min(a.size(), b.size());
  if (longer - shorter >= static_cast<size_t>(most)) return most;
  std::array<std::array<int, kSpelled + 1>, 3>
      rows{};  // of a prefix of `b` and the two shorter ones, with a column for each prefix of `a`
  std::iota(rows[0].begin(), rows[0].end(), 0);
  for (size_t j = 1; j <= b.size(); ++j) {
    auto &row = rows[j % 3], &previous = rows[(j + 2) % 3], &before = rows[(j + 1) % 3];
    int least = row[0] = static_cast<int>(j);
    for (size_t i = 1; i <= a.size(); ++i) {
      row[i] = std::min({previous[i] + 1, row[i - 1] + 1, previous[i - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) row[i] = std::min(row[i], before[i - 2] + 1);
      least = std::min(least, row[i]);
    }
    if (least >= most) return most;  // the least of a row never falls
  }
  return std::min(rows[b.size() % 3][a.size()], most);
}

}  // namespace

std::string nearest(std::string_view word, const std::vector<std::string>& candidates) {
  if (word.size() > kSpelled) return {};
  std::string best;
  int fewest = std::max<int>(1, static_cast<int>(word.size()) / 3) + 1;
  for (const std::string& candidate : candidates) {
    const int distance = edits(word, candidate, fewest);
    if (distance < fewest) {
      fewest = distance;
      best = candidate;
    }
  }
  if (!best.empty() || word.size() < 3) return best;
  // No slip, but perhaps only the beginning of a name: the shortest that goes on from it.
  for (const std::string& candidate : candidates)
    if (candidate.starts_with(word) && (best.empty() || candidate.size() < best.size())) best = candidate;
  return best;
}

}  // namespace shardlab
