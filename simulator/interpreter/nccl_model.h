// NCCL's own model of its collectives: which algorithm and protocol it considers fastest, and the time that it expects of each.
//
// Pure arithmetic on a description of the communicator's graphs, so that it can be held to tables that NCCL printed
// (NCCL_DEBUG_SUBSYS=TUNING). The rates that links really reach are the business of simulator/interpreter/fabric.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace shardlab::simulator {

/// The collective of a group. `bytes` is the full buffer as nccl-tests count it. All-reduce and broadcast: the vector that
/// every rank holds. Reduce-scatter and all-gather: the whole vector (ranks * shard). All-to-all: all that one rank sends,
/// its own part included.
enum class CollectiveUse : uint8_t { kAllReduce, kReduceScatter, kAllGather, kBroadcast, kReduce, kAllToAll };
inline constexpr int kCollectives = 6;
std::string_view name_of(CollectiveUse kind);

/// busbw = algbw * factor, as nccl-tests define it: 2 (n - 1) / n for all-reduce, (n - 1) / n for reduce-scatter, all-gather and
/// all-to-all, 1 for the others.
double bus_factor(CollectiveUse kind, int ranks);

enum class NcclAlgorithm : uint8_t { kTree, kRing, kNvls, kNvlsTree, kPat, kPairwise };
enum class NcclProtocol : uint8_t { kLl, kLl128, kSimple };
std::string_view name_of(NcclAlgorithm algorithm);
std::string_view name_of(NcclProtocol protocol);

enum class GpuGeneration : uint8_t { kVolta, kAmpere, kHopper, kBlackwell };

/// One graph that NCCL's search found: GB/s of one channel, within a node and between nodes.
struct NcclGraph {
  double channels = 0;
  double intra = 0;
  double inter = 0;
};

/// The input of NCCL's model.
struct NcclTopology {
  int ranks = 2;
  int nodes = 1;
  GpuGeneration generation = GpuGeneration::kHopper;
  bool nvlink = true;      ///< links within a node; else PCIe
  bool ll128 = true;       ///< off over paths that may tear a 128-byte store (sockets, some PCIe topologies)
  bool amd_cpu = false;    ///< posting to the network costs 2 us instead of 1
  bool split_tree = true;  ///< trees with their two halves on different devices (pattern "split" or "balanced"); else 0.85
  NcclGraph ring, tree;
  NcclGraph nvls;  ///< channels 0: none
};

/// One cell of the table: t[us] = latency_us + bytes / (1000 bandwidth_gbs). bandwidth 0: not available.
struct NcclCell {
  NcclAlgorithm algorithm = NcclAlgorithm::kRing;
  NcclProtocol protocol = NcclProtocol::kSimple;
  double latency_us = 0;
  double bandwidth_gbs = 0;  ///< of the full buffer
};

inline constexpr int kMaxNcclCells = 8;
struct NcclTable {
  std::array<NcclCell, kMaxNcclCells> cells;
  int count = 0;
};

/// The table of one kind of collective; cells that NCCL does not consider are left out. Empty for one rank and for all-to-all
/// (which has no model: it is sends). Formula: facts of NCCL's src/graph/tuning.cc (2.28.9 to 2.30): latency = base + steps * hop
/// by link; bandwidth = channels * rate
///   of a channel, limited per protocol and generation, times ranks / steps (ring, NVLS) or 1/2 (tree).
/// Units: microseconds, GB/s.
NcclTable nccl_table(CollectiveUse kind, const NcclTopology& topology);

/// Microseconds of a cell by NCCL's model: the table's line, with its corrections of the bandwidth of trees and of the latency of
/// rings by size.
double nccl_time_us(CollectiveUse kind, const NcclTopology& topology, const NcclCell& cell, double bytes);

/// Factor on the tree's bandwidth at `bytes`; 1 for other algorithms.
double nccl_tree_correction(NcclProtocol protocol, double bytes);
/// Factor on the ring's latency in an all-reduce between nodes once each rank has at least 64 bytes a channel.
double nccl_ring_plateau(GpuGeneration generation);

/// The channels that NCCL's search finds for rings and trees: the rate of a channel is of a fixed list, and channels are doubled.
/// `total_gbs` is what one device (within a node) or one node (between nodes) can send.
NcclGraph nccl_search(GpuGeneration generation, bool across_nodes, double total_gbs, double channel_limit_gbs);
/// The graph of the reducing switch of one node: a channel a rank, at most 32, never doubled. All but a rank's own part passes its
/// links, so the search may use n / (n - 1) of them.
NcclGraph nccl_search_nvls(GpuGeneration generation, int ranks, double total_gbs);

}  // namespace shardlab::simulator
