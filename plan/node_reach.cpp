#include "plan/node_reach.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "plan/base/check.h"

namespace shardlab {
namespace {

/// C(n - m, k) / C(n, k): the chance that k of n things are none of m of them.
double chance_of_none(int64_t n, int64_t m, int64_t k) {
  double chance = 1;
  for (int64_t i = 0; i < k; ++i) chance *= static_cast<double>(std::max<int64_t>(0, n - m - i)) / static_cast<double>(n - i);
  return chance;
}

/// For 0 to k of the weights, the sum over all such choices of their product.
std::vector<double> sums_of_products(std::span<const double> weights, std::span<const double> more, int64_t k) {
  std::vector<double> sums(static_cast<size_t>(k) + 1, 0.0);
  sums[0] = 1;
  for (const std::span<const double> part : {weights, more})
    for (const double w : part)
      for (size_t i = sums.size() - 1; i > 0; --i) sums[i] += w * sums[i - 1];
  return sums;
}

}  // namespace

double even_chance_of_node(const Experts& e, int nodes) {
  const int64_t of_node = e.count / nodes, of_group = e.count / e.groups, eligible = e.groups_chosen * of_group;
  double chance = 0;
  for (int node = 0; node < nodes; ++node) {
    // ways[g][x]: choices of g groups that have x of the node's experts, over the choices of groups so far.
    std::vector<std::vector<double>> ways(static_cast<size_t>(e.groups_chosen) + 1,
                                          std::vector<double>(static_cast<size_t>(of_node) + 1, 0.0));
    ways[0][0] = 1;
    for (int64_t group = 0; group < e.groups; ++group) {
      const int64_t first = std::max(group * of_group, node * of_node),
                    last = std::min((group + 1) * of_group, (node + 1) * of_node);
      const auto here = static_cast<size_t>(std::max<int64_t>(0, last - first));
      for (size_t g = ways.size() - 1; g > 0; --g)
        for (size_t x = here; x < ways[g].size(); ++x) ways[g][x] += ways[g - 1][x - here];
    }
    double all = 0, none = 0;
    for (size_t x = 0; x < ways.back().size(); ++x) {
      all += ways.back()[x];
      none += ways.back()[x] * chance_of_none(eligible, static_cast<int64_t>(x), e.top_k);
    }
    chance += (1 - none / all) / nodes;
  }
  return chance;
}

std::vector<double> chances_of_nodes(std::span<const double> shares, int nodes) {
  SHARDLAB_CHECK(nodes > 0 && shares.size() % static_cast<size_t>(nodes) == 0, "{} experts on {} nodes", shares.size(), nodes);
  constexpr double kSure = 1 - 1e-9;
  const size_t of_node = shares.size() / static_cast<size_t>(nodes);
  int64_t k = std::llround(std::accumulate(shares.begin(), shares.end(), 0.0));
  std::vector<double> weights;
  for (const double share : shares) {
    weights.push_back(share < kSure ? std::max(0.0, share) / (1 - share) : 0);
    k -= share < kSure ? 0 : 1;
  }
  k = std::max<int64_t>(k, 0);
  if (const double most = std::ranges::max(weights); most > 0)
    for (double& w : weights) w /= most;
  const double all = sums_of_products(weights, {}, k).back();
  std::vector<double> chances;
  for (size_t node = 0; node < static_cast<size_t>(nodes); ++node) {
    const auto own = shares.subspan(node * of_node, of_node);
    const std::span<const double> others(weights);
    const double none =
        all > 0 ? sums_of_products(others.first(node * of_node), others.subspan((node + 1) * of_node), k).back() / all : 1;
    chances.push_back(std::ranges::any_of(own, [](double s) { return s >= kSure; }) ? 1 : 1 - none);
  }
  return chances;
}

}  // namespace shardlab
