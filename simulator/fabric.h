// How long messages and collectives take between devices: the node and cluster levels of (device, node, cluster).
//
// Two steps. `prepare` works out, for one kind of collective on one shape of group, latency and bandwidth of every algorithm and
// protocol the library could choose; `CollectiveCost::seconds` is then a few multiplications per candidate. Nothing allocates.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

#include "plan/base/result.h"
#include "plan/machine.h"

namespace shardlab {

/// What a group does together. `bytes` is the full buffer as nccl-tests count it: all-reduce and broadcast the vector that every
/// rank holds; reduce-scatter and all-gather the whole of it (ranks * shard); all-to-all what one rank sends in all, its own part
/// included.
enum class Collective : uint8_t { kAllReduce, kReduceScatter, kAllGather, kBroadcast, kReduce, kAllToAll };
inline constexpr int kCollectives = 6;
std::string_view name_of(Collective kind);

enum class NcclAlgorithm : uint8_t { kTree, kRing, kNvls, kNvlsTree, kPat, kPairwise };
enum class NcclProtocol : uint8_t { kLl, kLl128, kSimple };
std::string_view name_of(NcclAlgorithm algorithm);
std::string_view name_of(NcclProtocol protocol);

/// A group of ranks by where they are: the same number on each of `nodes` nodes. A tensor-parallel group inside a node is {8, 1};
/// the data-parallel groups of 8 nodes with tp = 8 are {1, 8} with `groups_per_node` 8, as eight of them use the node's rails at
/// once. Neighbouring ranks are on one node.
struct Group {
  int ranks_per_node = 1;
  int nodes = 1;
  int groups_per_node = 1;  ///< groups of this shape that communicate at the same time through the same nodes

  int ranks() const { return ranks_per_node * nodes; }
};

/// The shape of a mesh axis's groups when ranks are laid out with `inner` ranks between two neighbours of the group: `ranks` of
/// them, `inner` apart, on nodes of `devices_per_node`. Groups that straddle nodes unevenly are counted on the most nodes touched.
Group group_of(int ranks, int inner, int devices_per_node);

/// One candidate: t = latency + bytes / bandwidth.
struct CollectiveLine {
  NcclAlgorithm algorithm = NcclAlgorithm::kRing;
  NcclProtocol protocol = NcclProtocol::kSimple;
  double latency_s = 0;
  double bytes_per_s = 0;        ///< of the full buffer (algbw)
  double tuned_latency_s = 0;    ///< what the library's own table says: it chooses by these two
  double tuned_bytes_per_s = 0;
};

/// Seconds of one kind of collective on one group, by size.
class CollectiveCost {
 public:
  struct Answer {
    double seconds = 0;
    NcclAlgorithm algorithm = NcclAlgorithm::kRing;
    NcclProtocol protocol = NcclProtocol::kSimple;
  };

  double seconds(double bytes) const { return answer(bytes).seconds; }
  /// With what the library chooses: the candidate that its own table thinks fastest, at the time that the fabric needs for it.
  Answer answer(double bytes) const;
  /// busbw = algbw * factor (nccl-tests): bytes/s.
  double bus_bytes_per_s(double bytes) const;

  int lines() const { return count_; }
  const CollectiveLine& line(int i) const { return lines_[i]; }

 private:
  friend class Fabric;
  static constexpr int kMaxLines = 10;
  Collective kind_ = Collective::kAllReduce;
  int ranks_ = 1;
  int nodes_ = 1;
  double channels_ = 1;
  int count_ = 0;
  std::array<CollectiveLine, kMaxLines> lines_;
};

/// What was measured on the very fabric (nccl-tests busbw of large messages, bytes/s); it replaces what the model thinks.
/// The values across nodes are of one group that spans all devices of its nodes; a group with fewer ranks a node gets its share.
struct MeasuredFabric {
  std::optional<double> all_reduce, all_gather, reduce_scatter;                    ///< across nodes
  std::optional<double> intra_all_reduce, intra_all_gather, intra_reduce_scatter;  ///< within a node
};

/// What computing and communicating at the same time cost each other: factors of time, 1 or more.
struct Contention {
  double compute = 1;        ///< memory-bound kernels and attention; matmuls lose `taken_sms` of the multiprocessors instead
  double communication = 1;  ///< of the collective
  double taken_sms = 0;
};

/// Messages and collectives of one machine.
///
/// Formula: NCCL's tuning model (src/graph/tuning.cc, 2.28 to 2.30) chooses algorithm and protocol: t = latency * steps + bytes /
///   bandwidth, with channels and rates found from the links as its graph search does. The time of the choice uses what of those
///   rates is really reached (Machine::fabric, fitted to the collective tables in simulator/published). Devices that are not joined
///   by a switch (xGMI, bridges, PCIe) have the same model with their own rates. All-to-all: each rank's traffic to its node's peers
///   over its link and to other nodes over its share of the rails, the slower of the two; send: latency + bytes / bandwidth.
/// Units: bytes/s one way, seconds.
/// Valid when: the group has the links for itself, but for `groups_per_node`; healthy links (else give MeasuredFabric).
///
/// Names in Machine::fabric:
///   rails_per_node      network interfaces of a node, each with devices_per_node * inter_bandwidth / rails (default: one a device)
///   oversubscription    of the network above the leaf switches (1: none); groups of more than `leaf_nodes` nodes share it
///   leaf_nodes          nodes under one leaf switch (0: all)
///   domain_devices      devices of a node that reach one another at link_bandwidth (default: all)
///   pair_links          1: link_bandwidth is the sum over direct links to each peer; one pair has its part only
///   amd_cpu             1: hosts with AMD processors, whose network posts cost NCCL 2 us instead of 1
///   intra_efficiency, inter_efficiency  of what NCCL's model expects of links and of rails, large messages
///   intra_latency, inter_latency        factors of the latencies of NCCL's model
class Fabric {
 public:
  /// Refuses more than one device without link bandwidth, more than one node without network bandwidth, and names in
  /// Machine::fabric that are unknown, not finite or not positive.
  static Result<Fabric> of(const Machine& machine);
  static Result<Fabric> of(const Machine& machine, const MeasuredFabric& measured);

  CollectiveCost prepare(Collective kind, const Group& group) const;
  /// 0 for a group of one rank.
  double collective_seconds(Collective kind, double bytes, const Group& group) const {
    return group.ranks() <= 1 ? 0 : prepare(kind, group).seconds(bytes);
  }

  /// One message between two devices of a node.
  double local_send_seconds(double bytes) const;
  /// One message between two nodes, while `sharing` devices of the node do the same.
  double remote_send_seconds(double bytes, double sharing = 1) const;
  double send_seconds(double bytes, bool remote, double sharing = 1) const {
    return remote ? remote_send_seconds(bytes, sharing) : local_send_seconds(bytes);
  }

  /// Both ways, for a collective on `group` beside computation.
  Contention contention(Collective kind, const Group& group) const;

  Provenance provenance() const { return provenance_; }  ///< the least trusted of its constants
  int devices_per_node() const { return devices_per_node_; }

 private:
  Fabric() = default;
  struct Rates;
  Rates rates(const Group& group) const;
  CollectiveCost all_to_all(const Group& group) const;

  int devices_per_node_ = 1;
  int sm_ = 0;                      ///< compute capability class as NCCL's tables have it: 0 Volta, 1 Ampere, 2 Hopper, 3 Blackwell
  double link_bytes_per_s_ = 0;     ///< one way, per device
  double inter_bytes_per_s_ = 0;    ///< one way, per device
  double rails_per_node_ = 1;
  double oversubscription_ = 1;
  double leaf_nodes_ = 0;
  double domain_devices_ = 0;
  bool pair_links_ = false;
  bool amd_cpu_ = false;
  bool switched_ = true;
  double intra_efficiency_ = 1, inter_efficiency_ = 1, intra_latency_ = 1, inter_latency_ = 1;
  MeasuredFabric measured_;
  Provenance provenance_ = Provenance::kTransferred;
};

}  // namespace shardlab
