// How long messages and collectives take between devices: the node and cluster levels of (device, node, cluster).
//
// Two steps. `prepare` works out, for one kind of collective on one shape of group, latency and bandwidth of every algorithm and
// protocol the library could choose; `CollectiveCost::seconds` is then a few multiplications per candidate. Nothing allocates.
#pragma once

#include <array>
#include <cmath>
#include <optional>

#include "plan/base/result.h"
#include "plan/case.h"
#include "plan/machine.h"
#include "plan/row_levels.h"
#include "simulator/interpreter/nccl_model.h"

namespace shardlab::simulator {

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

/// Seconds of one kind of collective on one group, by size.
class CollectiveCost {
 public:
  struct Answer {
    double seconds = 0;
    NcclAlgorithm algorithm = NcclAlgorithm::kRing;
    NcclProtocol protocol = NcclProtocol::kSimple;
  };
  /// One candidate: what the library's table says of it (by which it chooses), and what the fabric needs: latency + bytes / rate.
  struct Line {
    NcclCell tuned;
    double latency_s = 0;
    double bytes_per_s = 0;              ///< of the full buffer
    double most_bytes_per_s = HUGE_VAL;  ///< whatever the size
  };

  /// 0 for a group of one rank, infinite where nothing joins its ranks.
  double seconds(double bytes) const { return answer(bytes).seconds; }
  /// The candidate that the library's own table thinks fastest, at the time that the fabric needs for it.
  Answer answer(double bytes) const;
  /// algbw * bus_factor, bytes/s.
  double bus_bytes_per_s(double bytes) const;

  int lines() const { return count_; }
  const Line& line(int i) const { return lines_[i]; }

 private:
  friend class Fabric;
  CollectiveUse kind_ = CollectiveUse::kAllReduce;
  GpuGeneration generation_ = GpuGeneration::kHopper;
  int ranks_ = 1;
  double plateau_bytes_ = 0;  ///< from here on the latency of a simple ring across nodes is raised; 0: never
  double ranks_s_ = 0;        ///< least latency of a ring across nodes: its ranks pass the message on one after the other
  int count_ = 0;
  std::array<Line, kMaxNcclCells> lines_;
};

/// Measurements on the very fabric: nccl-tests busbw, bytes/s. A machine file has them as constants busbw.all_reduce,
/// busbw.intra_all_gather, busbw.bytes and so on of its fabric (`shardlab comm --import`). The error of the model on the measured group corrects the model of
/// every group. A rate over 64 nodes says nothing directly about a group over two nodes, whose ring has 32 times fewer steps.
struct MeasuredFabric {
  std::optional<double> all_reduce, all_gather, reduce_scatter;                    ///< over all devices of all nodes
  std::optional<double> intra_all_reduce, intra_all_gather, intra_reduce_scatter;  ///< over all devices of one node
  /// The size of the messages they were measured with: latency and rate are corrected alike, so that it takes just what was
  /// measured. 0: so large that latency did not count; the rate is corrected, latency is not.
  double bytes = 256 << 20;
  int nodes = 0;  ///< over which the first three were measured; 0: all of the machine
  friend bool operator==(const MeasuredFabric&, const MeasuredFabric&) = default;
};

/// The mutual cost of computing and communicating at the same time: factors of time, 1 or more.
struct Contention {
  double compute = 1;        ///< of kernels that memory binds, for the bandwidth that the collective takes
  double communication = 1;  ///< of the collective
  double taken_sms = 0;      ///< multiprocessors that the collective holds; DeviceModel knows their price for kernels
};

/// Constants of the fabric beyond the two bandwidths, by the names of Machine::fabric. Defaults are the constants of a node of H100
/// (fitted there, see sweeps/machines/hgx-h100-ndr.yaml; transferred anywhere else), without its reducing switch.
struct FabricConstants {
  double rails_per_node = 0;        ///< network interfaces of a node; together devices_per_node * inter_bandwidth. 0: one a device
  double oversubscription = 1;      ///< of the network above the leaf switches, shared by groups of more than `leaf_nodes` nodes
  double leaf_nodes = 0;            ///< nodes under one leaf switch; 0: all
  double pair_links = 0;            ///< 1: direct links, link_bandwidth is the sum over all peers; 0: a switch
  double domain_devices = 0;        ///< neighbours that link_bandwidth joins (2: bridges); 0: all devices of a node
  double pcie_bytes_per_s = 20e9;   ///< that a ring reaches over PCIe and the host, where a group spans several such domains
  double pcie = 0;                  ///< 1: devices reach one another over PCIe and the host
  double nvls = 0;                  ///< 1: the switch reduces (NVLink SHARP)
  double amd_cpu = 0;               ///< 1: posting to the network costs NCCL 2 us instead of 1
  double ring_efficiency = 0.86;    ///< of link_bandwidth, by long rings and trees within a node
  double ring_start = 0.6;          ///< a: a ring of n ranks reaches 1 / (1 + a / n) of that; short rings keep less under way
  double reduce_efficiency = 0.95;  ///< of rings that reduce, relative to those that only copy
  double nvls_efficiency = 0.57;    ///< of link_bandwidth, each way through the reducing switch
  double inter_efficiency = 0.9;    ///< of the rate of the network, by rings
  double tree_efficiency = 1;       ///< of that rate, by trees across nodes, the reducing switch's too
  double intra_latency = 2;         ///< of the latencies of NCCL's model within a node
  double inter_latency = 1.5;       ///< of the latencies of NCCL's model between nodes
  double send_latency_s = 22e-6;    ///< one message within a node
  double remote_latency_s = 22e-6;  ///< one message between nodes
  double send_efficiency = 0.65;    ///< of the link, by one message within a node
  double send_small_bytes_per_s = 75e9;  ///< within a node, by the channels that NCCL gives to a message of at most 64 MiB
  double remote_send_efficiency = 0.66;  ///< of the rail, by one message between nodes: a message has fewer channels than a ring
  double all_to_all_efficiency = 0.7;    ///< of the links' rate, by exchanges of all with all
  double all_to_all_latency_s = 40e-6;   ///< an exchange of two
  double rank_latency_s = 0;             ///< of each rank behind the first, in a gather or a scatter across nodes; 0: the model's
  double message_s = 0.5e-6;             ///< of each further peer in an exchange of all with all
  double memory_traffic = 3;  ///< bytes of device memory moved per byte sent: received, read to forward or reduce, read or written
                              ///< locally
};

/// How the collectives of a group are done.
struct CollectiveStyle {
  bool stepped = false;  ///< by shardlab's own algorithms, step by step (plan/collective_steps.h); else by NCCL
  /// NCCL: kAuto is its own choice, kRing leaves it its rings alone; it has no other.
  AlgorithmChoice choice = AlgorithmChoice::kAuto;
};

/// Messages and collectives of one machine.
///
/// Formula: NCCL's tuning model (src/graph/tuning.cc, 2.28 to 2.30) chooses algorithm and protocol: t = latency * steps + bytes /
///   bandwidth, with channels and rates found from the links as its graph search does. The time of the choice uses what of those
///   rates is really reached (Machine::fabric, fitted to the collective tables in simulator/published). Devices that are not joined
///   by a switch (xGMI, bridges, PCIe) have the same model with their own rates. Gathers and scatters across nodes have rings alone;
///   their latency is (ranks - 1) rank_latency_s where that is longer than the model's. All-to-all: each rank's traffic to its node's
///   peers over its link and to other nodes over its share of the rails, the slower of the two; send: latency + bytes / bandwidth.
/// Units: bytes/s one way, seconds.
/// Valid when: the group has the links for itself, but for `groups_per_node`; healthy links (else give MeasuredFabric).
///
class Fabric {
 public:
  /// Refuses more than one device without link bandwidth, more than one node without network bandwidth, and names in
  /// Machine::fabric that are unknown, not finite or not positive.
  static Result<Fabric> of(const Machine& machine, const MeasuredFabric& measured = {});

  /// Stepped: what DatasheetCostModel says of the same steps. An exchange of all with all is priced alike under every style.
  CollectiveCost prepare(CollectiveUse kind, const Group& group, const CollectiveStyle& style = {}) const;
  /// 0 for a group of one rank.
  double collective_seconds(CollectiveUse kind, double bytes, const Group& group, const CollectiveStyle& style = {}) const {
    return group.ranks() <= 1 ? 0 : prepare(kind, group, style).seconds(bytes);
  }

  /// Rows of experts that go by node, where routes are even: as DatasheetCostModel prices the same steps.
  double by_node_seconds(const RowLevels& levels) const;

  /// One message between two devices of a node.
  double local_send_seconds(double bytes) const;
  /// One message between two nodes, while `sharing` devices of the node do the same.
  double remote_send_seconds(double bytes, double sharing = 1) const;
  double send_seconds(double bytes, bool remote, double sharing = 1) const {
    return remote ? remote_send_seconds(bytes, sharing) : local_send_seconds(bytes);
  }

  /// Both ways, for a collective on `group` beside computation. The collective's copies take device memory bandwidth from kernels
  /// that need it, and its thread blocks hold multiprocessors of their own.
  Contention contention(CollectiveUse kind, const Group& group) const;

  /// The least trusted among the constants that a group inside one node (or across nodes) is predicted with.
  Provenance provenance(bool across_nodes) const;
  const FabricConstants& constants() const { return constants_; }
  int devices_per_node() const { return devices_per_node_; }

 private:
  Fabric() = default;
  /// The rates that a group really gets, bytes/s one way: of one device within the node, and of its share of a node's network.
  struct Rates {
    double link = 0;
    double node = 0;
    bool pcie = false;  ///< the group leaves the domain of its links: `link` is what PCIe reaches
  };
  Rates rates(const Group& group) const;
  NcclTopology topology(const Group& group, const Rates& rates) const;
  double link_rate(CollectiveUse kind, const Group& group, const Rates& rates) const;
  double ring_rate(CollectiveUse kind, const Group& group, const Rates& rates) const;
  double line_rate(CollectiveUse kind, const Group& group, const Rates& rates, const NcclTopology& topology,
                   const NcclCell& cell) const;
  void correct(const MeasuredFabric& measured, int nodes);
  CollectiveCost all_to_all(const Group& group) const;
  CollectiveCost by_steps(CollectiveUse kind, const Group& group, AlgorithmChoice choice) const;

  int devices_per_node_ = 1;
  GpuGeneration generation_ = GpuGeneration::kAmpere;
  double link_bytes_per_s_ = 0;   ///< one way, per device
  double inter_bytes_per_s_ = 0;  ///< one way, per device
  double memory_bytes_per_s_ = 0;
  FabricConstants constants_;
  /// Measured over modelled rates; 1 where nothing was measured.
  struct Correction {
    double latency = 1, seconds_per_byte = 1;
    bool measured = false;
  };
  const Correction& correction(CollectiveUse kind, bool across) const;
  std::array<Correction, 3> within_, across_;  ///< of all-reduce, all-gather, reduce-scatter
  ByName<Provenance> provenance_;
};

}  // namespace shardlab::simulator
