#include "simulator/interpreter/nccl_model.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <span>

namespace shardlab::simulator {

namespace {

// Rows: LL, LL128, Simple. All from the tuner's default constants, NCCL 2.28.9 to 2.30; microseconds and GB/s.
struct Hop {
  double tree[3];
  double ring[3];
  double nvls, nvls_tree, pat;
};
constexpr double kBaseTree[3] = {6.8, 14.0, 8.4};
constexpr double kBaseRing[3] = {6.6, 14.0, 8.4};
constexpr double kBasePat = 8.0;
constexpr Hop kNvlink = {{0.6, 1.25, 4.0}, {0.6, 1.9, 3.4}, 25, 25, 4.0};
constexpr Hop kPci = {{1.0, 1.9, 4.0}, {1.0, 2.5, 5.7}, 0, 0, 4.0};
constexpr Hop kNet = {{5.0, 8.5, 14.0}, {2.7, 4.0, 14.0}, 18, 20.9, 14.0};

// By generation, then by one node, two, more.
constexpr double kLlMax[4][3] = {{39.0, 39.0, 20.4}, {87.7, 22.5, 19.0}, {141.0, 45.0, 35.0}, {282.0, 90.0, 70.0}};
constexpr double kRingLl128[4] = {20.0, 20.0, 36.7, 40.0};
constexpr double kTreeLl128[4][3] = {{20.0, 20.0, 20.0}, {20.0, 20.0, 20.0}, {36.7, 36.7, 29.0}, {55.6, 31.67, 20.0}};
constexpr double kTreeMax[4][3] = {{26.5, 18.5, 10.0}, {24.0, 23.6, 17.8}, {38.7, 41.4, 36.0}, {70.0, 42.8, 24.0}};
constexpr double kNvlsTreeMax[4][3] = {{26.5, 18.5, 10.0}, {24.0, 23.6, 17.8}, {0.0, 57.7, 45.5}, {0.0, 96.0, 80.0}};
constexpr double kNvlsEfficiency[4] = {0, 0, 0.85, 0.74};

constexpr float kTreeCorrection[3][24] = {
    {1.0, 1.0, 1.0, 1.0, .9, .8, .7, .7, .7, .7, .6, .5, .4, .4, .5, .6, .7, .8, .9, 1.0, 1.0, 1.0, 1.0, 1.0},
    {1.0, 1.0, 1.0, 1.0, 1.0, .9, .8, .8, .8, .7, .6, .6, .6, .6, .6, .6, .8, .9, .9, .9, .9, 1.0, 1.0, 1.0},
    {.9, .9, .9, .9, .9, .9, .9, .8, .7, .6, .6, .5, .5, .5, .5, .6, .7, .8, .7, .7, .8, .9, .9, .9}};

constexpr double kSpeedsIntra[] = {40, 30, 20, 18, 15, 12, 10, 9, 7, 6, 5, 4, 3};
constexpr double kSpeedsInter[] = {48, 30, 28, 24, 20, 18, 15, 12, 10, 9, 7, 6, 5, 4, 3, 2.4, 1.2, 0.24, 0.12};
constexpr double kHopperIntra[] = {60, 50, 40, 30, 24, 20, 15, 12, 11, 6, 3};
constexpr double kHopperInter[] = {48, 45, 42, 40, 30, 24, 22, 20, 17.5, 15, 12, 6, 3, 2.4, 1.2, 0.24, 0.12};
constexpr double kBlackwellIntra[] = {90, 80, 70, 60, 50, 45, 40, 30, 24, 20, 19, 18};
constexpr double kBlackwellInter[] = {96, 86, 80, 48, 45.1, 42, 40, 30, 24, 22, 20, 17.5, 15, 12, 6, 3, 2.4, 1.2, 0.24, 0.12};

std::span<const double> speeds(GpuGeneration generation, bool across_nodes) {
  if (generation == GpuGeneration::kBlackwell) return across_nodes ? std::span<const double>(kBlackwellInter) : kBlackwellIntra;
  if (generation == GpuGeneration::kHopper) return across_nodes ? std::span<const double>(kHopperInter) : kHopperIntra;
  return across_nodes ? std::span<const double>(kSpeedsInter) : kSpeedsIntra;
}

int log2_floor(int n) { return std::bit_width(static_cast<unsigned>(n)) - 1; }

/// The inputs of a table, with the names of the formulas.
class Tuner {
 public:
  Tuner(CollectiveUse kind, const NcclTopology& topology)
      : kind_(kind),
        t_(topology),
        generation_(static_cast<int>(topology.generation)),
        nodes_row_(topology.nodes <= 2 ? topology.nodes - 1 : 2),
        intra_(topology.nvlink ? kNvlink : kPci),
        steps_(kind == CollectiveUse::kAllReduce                                            ? 2 * (topology.ranks - 1)
               : kind == CollectiveUse::kReduceScatter || kind == CollectiveUse::kAllGather ? topology.ranks - 1
                                                                                            : topology.ranks) {
    // The limit of LL depends on the device within a node and on the host's processor between nodes.
    ll_max_ = kLlMax[topology.nodes == 1 ? generation_ : topology.amd_cpu ? 1 : 0][nodes_row_];
  }

  NcclTable table() {
    const bool gathers = kind_ == CollectiveUse::kReduceScatter || kind_ == CollectiveUse::kAllGather;
    for (int p = 0; p < 3; ++p) ring(p);
    if (kind_ == CollectiveUse::kAllReduce)
      for (int p = 0; p < 3; ++p) tree(p);
    if (t_.nvls.channels >= 2 && t_.nodes == 1 && (gathers || kind_ == CollectiveUse::kAllReduce)) nvls();
    if (t_.nvls.channels >= 2 && t_.nodes > 1 && kind_ == CollectiveUse::kAllReduce) nvls_tree();
    if (gathers && t_.nodes == t_.ranks) pat();
    return out_;
  }

 private:
  double rate(const NcclGraph& graph) const { return t_.nodes <= 2 ? graph.intra : graph.inter; }
  bool one_rank_a_node() const { return t_.ranks == t_.nodes; }

  void add(NcclAlgorithm algorithm, int protocol, double latency, double bandwidth) {
    if (bandwidth <= 0 || (protocol == 1 && !t_.ll128)) return;
    out_.cells[out_.count++] = {algorithm, static_cast<NcclProtocol>(protocol), latency, bandwidth};
  }

  void ring(int p) {
    double bus = t_.ring.channels * rate(t_.ring);
    if (p == 0) bus = std::min(ll_max_, bus * 0.5);
    if (p == 1) bus = std::min(bus * 0.92, t_.ring.channels * kRingLl128[generation_]);
    double latency = kBaseRing[p];
    if (kind_ == CollectiveUse::kBroadcast || kind_ == CollectiveUse::kReduce) {
      latency += (t_.nodes > 1 ? kNet : intra_).ring[p];  // pipelined: one hop, not one a rank
    } else {
      // With one rank a node nothing hides the network; each step of a ring across nodes posts to it at least once.
      const double inter = one_rank_a_node() ? kNet.tree[p] : kNet.ring[p];
      const double post = t_.nodes > 1 ? (t_.amd_cpu ? 2.0 : 1.0) * (p == 2 ? 3 : 1) : 0;
      const int across = t_.nodes == 1 ? 0 : kind_ == CollectiveUse::kAllReduce ? 2 * (t_.nodes - 1) : t_.nodes - 1;
      latency += (steps_ - across) * std::max(intra_.ring[p], post) + across * inter;
    }
    add(NcclAlgorithm::kRing, p, latency, bus * t_.ranks / steps_);
  }

  void tree(int p) {
    double bus = std::min(t_.tree.channels * rate(t_.tree) * 0.92, t_.tree.channels * kTreeMax[generation_][nodes_row_]);
    if (p == 0) bus = std::min(bus / 3.8, ll_max_);
    if (p == 1)
      bus = std::min(bus * (t_.nodes == 1 ? 7.0 / 9.0 : 120.0 / 128.0), t_.tree.channels * kTreeLl128[generation_][nodes_row_]);
    if (!t_.split_tree) bus *= 0.85;
    const double latency = kBaseTree[p] + 2 * ((t_.ranks / t_.nodes - 1) * intra_.tree[p] + log2_floor(t_.nodes) * kNet.tree[p]);
    add(NcclAlgorithm::kTree, p, latency, bus * 0.5);
  }

  double nvls_channel() const { return t_.nvls.intra * kNvlsEfficiency[generation_] * (t_.nvls.channels - 1) / t_.nvls.channels; }

  void nvls() {
    const double per_node = static_cast<double>(t_.ranks) / t_.nodes;
    const bool reduce = kind_ == CollectiveUse::kAllReduce;
    const double bus = t_.nvls.channels * nvls_channel() * (reduce ? 2 : (per_node - 1) / per_node);
    add(NcclAlgorithm::kNvls, 2, kNvlink.nvls, reduce ? bus * t_.ranks / steps_ : bus);
  }

  void nvls_tree() {
    const double inter = t_.nvls.inter * (t_.nodes <= 2 ? 2 : 1);
    const double channel = std::min({nvls_channel() * 2, inter, kNvlsTreeMax[generation_][nodes_row_]});
    add(NcclAlgorithm::kNvlsTree, 2, kNvlink.nvls_tree + 2 * log2_floor(t_.nodes) * kNet.nvls_tree,
        t_.nvls.channels * channel * t_.ranks / steps_);
  }

  void pat() {
    add(NcclAlgorithm::kPat, 2, kBasePat + log2_floor(t_.nodes) * kNet.pat / 3.5 + t_.ranks * 2.8,
        t_.tree.channels * rate(t_.tree) * 0.75);
  }

  CollectiveUse kind_;
  const NcclTopology& t_;
  int generation_;
  int nodes_row_;
  const Hop& intra_;
  int steps_;
  double ll_max_ = 0;
  NcclTable out_;
};

}  // namespace

std::string_view name_of(CollectiveUse kind) {
  constexpr std::string_view names[] = {"all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all"};
  return names[static_cast<int>(kind)];
}

std::string_view name_of(NcclAlgorithm algorithm) {
  constexpr std::string_view names[] = {"tree", "ring", "nvls", "nvls_tree", "pat", "pairwise"};
  return names[static_cast<int>(algorithm)];
}

std::string_view name_of(NcclProtocol protocol) {
  constexpr std::string_view names[] = {"ll", "ll128", "simple"};
  return names[static_cast<int>(protocol)];
}

double bus_factor(CollectiveUse kind, int ranks) {
  const double n = ranks;
  switch (kind) {
    case CollectiveUse::kAllReduce: return 2 * (n - 1) / n;
    case CollectiveUse::kReduceScatter:
    case CollectiveUse::kAllGather:
    case CollectiveUse::kAllToAll: return (n - 1) / n;
    case CollectiveUse::kBroadcast:
    case CollectiveUse::kReduce: return 1;
  }
  return 1;
}

NcclTable nccl_table(CollectiveUse kind, const NcclTopology& topology) {
  if (topology.ranks <= 1 || kind == CollectiveUse::kAllToAll) return {};
  return Tuner(kind, topology).table();
}

double nccl_tree_correction(NcclProtocol protocol, double bytes) {
  if (bytes < 64 || bytes >= 64.0 * (1 << 23)) return 1;
  return kTreeCorrection[static_cast<int>(protocol)][std::bit_width(static_cast<uint64_t>(bytes) >> 6) - 1];
}

double nccl_ring_plateau(GpuGeneration generation) { return generation == GpuGeneration::kVolta ? 1.9 : 1.4; }

double nccl_time_us(CollectiveUse kind, const NcclTopology& t, const NcclCell& cell, double bytes) {
  double latency = cell.latency_us;
  double bandwidth = cell.bandwidth_gbs;
  if (cell.algorithm == NcclAlgorithm::kTree) bandwidth *= nccl_tree_correction(cell.protocol, bytes);
  if (cell.algorithm == NcclAlgorithm::kRing && cell.protocol == NcclProtocol::kSimple && t.nodes > 1 &&
      kind == CollectiveUse::kAllReduce && bytes / (t.ring.channels * t.ranks) >= 64)
    latency *= nccl_ring_plateau(t.generation);
  return latency + bytes / (1000 * bandwidth);
}

NcclGraph nccl_search(GpuGeneration generation, bool across_nodes, double total_gbs, double channel_limit_gbs) {
  NcclGraph best;
  for (const double speed : speeds(generation, across_nodes)) {
    if (speed > channel_limit_gbs && speed > 0.12) continue;
    const double channels = std::min(std::floor(total_gbs / speed * (1 + 1e-9)), 32.0);
    if (channels >= 1 && channels * speed > best.channels * best.intra * (1 + 1e-9)) best = {channels, speed, speed};
  }
  if (best.channels == 0) return {1, total_gbs, total_gbs};  // slower than the slowest of the list
  // Channels of fast links are doubled at half the rate; Hopper and later only when they are few or very fast.
  const bool doubled = best.intra >= 25 && !(generation >= GpuGeneration::kHopper && best.intra < 50 && best.channels > 4);
  if (doubled) best = {2 * best.channels, best.intra / 2, best.inter / 2};
  return best;
}

NcclGraph nccl_search_nvls(GpuGeneration generation, int ranks, double total_gbs) {
  const double channels = std::min(ranks, 32);
  const double most = total_gbs * ranks / (ranks - 1) / channels;
  for (const double speed : speeds(generation, false))
    if (speed <= most) return {channels, speed, speed};
  return {channels, most, most};
}

}  // namespace shardlab::simulator
