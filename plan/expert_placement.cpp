#include "plan/expert_placement.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <numeric>

#include "plan/base/check.h"

namespace shardlab {
namespace {

/// Takes a number of at most 2^20 off the beginning of a text.
std::optional<int32_t> take_number(std::string_view& text) {
  int32_t n = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), n);
  if (error != std::errc() || n < 0 || n > (1 << 20)) return std::nullopt;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return n;
}

bool take_mark(std::string_view& text, char mark) {
  if (text.empty() || text.front() != mark) return false;
  text.remove_prefix(1);
  return true;
}

/// Experts by rank, and the load of each rank.
struct Dealt {
  std::vector<std::vector<int32_t>> experts;
  std::vector<double> load;
};

/// Experts from the largest load down, each to the rank with the least load that has room.
Dealt deal_by_load(std::span<const double> loads, int ranks) {
  const size_t each = loads.size() / static_cast<size_t>(ranks);
  std::vector<int32_t> order(loads.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, std::greater(), [&](int32_t e) { return loads[static_cast<size_t>(e)]; });
  Dealt dealt{std::vector<std::vector<int32_t>>(static_cast<size_t>(ranks)), std::vector<double>(static_cast<size_t>(ranks))};
  for (const int32_t e : order) {
    size_t least = dealt.experts.size();
    for (size_t r = 0; r < dealt.experts.size(); ++r)
      if (dealt.experts[r].size() < each && (least == dealt.experts.size() || dealt.load[r] < dealt.load[least])) least = r;
    dealt.experts[least].push_back(e);
    dealt.load[least] += loads[static_cast<size_t>(e)];
  }
  return dealt;
}

/// The least part of the fullest rank's load by which an exchange lowers it: rounding is no gain.
constexpr double kLeastExchange = 1e-9;

/// Exchanges an expert of the fullest rank with one of another rank by which the larger of both loads is least. False where it does not fall.
/// Each exchange lowers the sum of the squares of the loads, so that they come to an end.
bool exchange_once(std::span<const double> loads, Dealt& dealt) {
  const auto full = static_cast<size_t>(std::ranges::max_element(dealt.load) - dealt.load.begin());
  double least = (1 - kLeastExchange) * dealt.load[full], given = 0;
  int32_t *from = nullptr, *to = nullptr;
  size_t other = full;
  for (size_t r = 0; r < dealt.experts.size(); ++r) {
    if (r == full) continue;
    for (int32_t& a : dealt.experts[full])
      for (int32_t& b : dealt.experts[r]) {
        const double less = loads[static_cast<size_t>(a)] - loads[static_cast<size_t>(b)];
        const double larger = std::max(dealt.load[full] - less, dealt.load[r] + less);
        if (larger < least) least = larger, given = less, from = &a, to = &b, other = r;
      }
  }
  if (from == nullptr) return false;
  std::swap(*from, *to);
  dealt.load[full] -= given, dealt.load[other] += given;
  return true;
}

bool is_in_order(const ExpertPlacement& placement) { return std::ranges::is_sorted(placement.experts); }

}  // namespace

ExpertPlacement place_experts(int layer, std::vector<int32_t> experts) {
  ExpertPlacement p{layer, std::move(experts), {}};
  std::vector<int32_t> places(p.experts.size(), -1);
  for (size_t place = 0; place < p.experts.size(); ++place) {
    const int32_t e = p.experts[place];
    if (e < 0 || e >= std::ssize(places) || places[static_cast<size_t>(e)] >= 0) return p;
    places[static_cast<size_t>(e)] = static_cast<int32_t>(place);
  }
  p.places = std::move(places);
  return p;
}

std::string placement_fault(const ExpertPlacement& placement, int64_t count) {
  if (std::ssize(placement.experts) != count) return fmt::format("{} places for {} experts", placement.experts.size(), count);
  std::vector<bool> placed(static_cast<size_t>(count));
  for (const int32_t e : placement.experts) {
    if (e < 0 || e >= count) return fmt::format("expert {} of {}, from 0 on", e, count);
    if (placed[static_cast<size_t>(e)]) return fmt::format("expert {} has two places", e);
    placed[static_cast<size_t>(e)] = true;
  }
  return "";
}

const ExpertPlacement* placement_of(std::span<const ExpertPlacement> placements, int layer) {
  const auto found = std::ranges::lower_bound(placements, layer, {}, &ExpertPlacement::layer);
  return found != placements.end() && found->layer == layer ? &*found : nullptr;
}

std::optional<int> layer_of_expert_weight(std::string_view parameter) {
  constexpr std::string_view kLayers = "layers.";
  if (!parameter.starts_with(kLayers)) return std::nullopt;
  parameter.remove_prefix(kLayers.size());
  const auto layer = take_number(parameter);
  if (!layer || (parameter != ".moe.wup" && parameter != ".moe.wdown")) return std::nullopt;
  return *layer;
}

std::string print_placements(std::span<const ExpertPlacement> placements) {
  std::string text;
  for (const ExpertPlacement& p : placements)
    text += fmt::format("{}{}:{}", text.empty() ? "" : " ", p.layer, fmt::join(p.experts, ","));
  return text;
}

std::optional<std::vector<ExpertPlacement>> read_placements(std::string_view text) {
  std::vector<ExpertPlacement> placements;
  while (true) {
    const auto layer = take_number(text);
    if (!layer || !take_mark(text, ':') || (!placements.empty() && placements.back().layer >= *layer)) return std::nullopt;
    std::vector<int32_t> experts;
    do {
      const auto expert = take_number(text);
      if (!expert) return std::nullopt;
      experts.push_back(*expert);
    } while (take_mark(text, ','));
    placements.push_back(place_experts(*layer, std::move(experts)));
    if (text.empty()) return placements;
    if (!take_mark(text, ' ')) return std::nullopt;
  }
}

double imbalance_under(const ExpertPlacement* placement, std::span<const double> loads, int ranks) {
  SHARDLAB_CHECK(ranks >= 1 && std::ssize(loads) % ranks == 0, "{} experts over {} ranks", loads.size(), ranks);
  const double all = std::accumulate(loads.begin(), loads.end(), 0.0);
  if (!(all > 0)) return 1;
  const size_t each = loads.size() / static_cast<size_t>(ranks);
  double fullest = 0;
  for (size_t first = 0; first < loads.size(); first += each) {
    double load = 0;
    for (size_t place = first; place < first + each; ++place)
      load += loads[placement != nullptr ? static_cast<size_t>(placement->experts[place]) : place];
    fullest = std::max(fullest, load);
  }
  return fullest * ranks / all;
}

ExpertPlacement balanced_placement(int layer, std::span<const double> loads, int ranks) {
  SHARDLAB_CHECK(ranks >= 1 && std::ssize(loads) % ranks == 0, "{} experts over {} ranks", loads.size(), ranks);
  Dealt dealt = deal_by_load(loads, ranks);
  for (bool falls = true; falls;) falls = exchange_once(loads, dealt);
  std::vector<int32_t> experts;
  for (std::vector<int32_t>& own : dealt.experts) {
    std::ranges::sort(own);
    experts.insert(experts.end(), own.begin(), own.end());
  }
  return place_experts(layer, std::move(experts));
}

std::optional<ExpertPlacement> placement_after(int layer, std::span<const double> loads, int ranks,
                                               const ExpertPlacement* present) {
  ExpertPlacement next = balanced_placement(layer, loads, ranks);
  const double now = imbalance_under(present, loads, ranks);
  if (now - imbalance_under(&next, loads, ranks) < kLeastPlacementGain * now) {
    if (present == nullptr) return std::nullopt;
    next = *present;
  }
  if (is_in_order(next)) return std::nullopt;
  return next;
}

}  // namespace shardlab
