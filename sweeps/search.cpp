#include "sweeps/search.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <tuple>

#include "plan/base/hash.h"
#include "sweeps/document.h"

namespace shardlab::sweeps {

std::string_view name_of(SearchKind kind) {
  switch (kind) {
    case SearchKind::kGrid: return "grid";
    case SearchKind::kRandom: return "random";
    case SearchKind::kHalving: return "halving";
    case SearchKind::kGoal: return "goal";
  }
  return "?";
}

std::optional<SearchKind> search_kind_named(std::string_view name) {
  for (const SearchKind kind : {SearchKind::kGrid, SearchKind::kRandom, SearchKind::kHalving, SearchKind::kGoal})
    if (name_of(kind) == name) return kind;
  return std::nullopt;
}

const Search& search_of(const Sweep& sweep) { return sweep.content().search; }

std::vector<int64_t> shuffled(int64_t n, int64_t seed) {
  std::vector<int64_t> order(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  const uint64_t start = mix(static_cast<uint64_t>(seed));
  const auto key = [&](int64_t i) { return mix(start + static_cast<uint64_t>(i)); };  // distinct: `mix` is one to one
  std::ranges::sort(order, {}, key);
  return order;
}

void rank(std::vector<Ranked>& points) {
  std::ranges::sort(points, {}, [](const Ranked& r) { return std::tuple(r.step_s, r.place); });
}

size_t survivors(size_t n, double keep) {
  return std::min(n, std::max<size_t>(1, static_cast<size_t>(std::ceil(keep * static_cast<double>(n)))));
}

bool Goal::ran(std::optional<double> step_s) {
  ++run_;
  if (step_s && (!best_ || *step_s < *best_)) best_ = step_s;
  return reached();
}

bool Goal::reached() const { return run_ >= ranked_.size() || (best_ && *best_ <= least_of_rest()); }

std::string Goal::reason() const {
  const auto ms = [](double s) { return fmt::format("{:.4g} ms", 1e3 * s); };
  if (run_ >= ranked_.size()) return fmt::format("every one of the {} points was run: their intervals do not part before", run_);
  return fmt::format("the best of {} points takes {}, each of the {} others at least {}: its estimate less {:g} %", run_,
                     ms(*best_), ranked_.size() - run_, ms(least_of_rest()), 100 * margin_);
}

}  // namespace shardlab::sweeps
