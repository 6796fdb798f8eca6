#include "simulator/interpreter/fabric.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <span>
#include <utility>

#include "plan/automatic.h"
#include "plan/collective_steps.h"
#include "simulator/interpreter/efficiency.h"
#include "simulator/interpreter/own_collectives.h"

namespace shardlab::simulator {

namespace {

struct FabricConstant {
  std::string_view name;
  double FabricConstants::*value;
  enum class Level : uint8_t { kNode, kCluster, kShape } level;  ///< kShape: a fact of the build, not a rate
};

std::span<const FabricConstant> fabric_constants() {
  using F = FabricConstants;
  using L = FabricConstant::Level;
  static constexpr FabricConstant table[] = {
      {"rails_per_node", &F::rails_per_node, L::kShape},
      {"oversubscription", &F::oversubscription, L::kShape},
      {"leaf_nodes", &F::leaf_nodes, L::kShape},
      {"pair_links", &F::pair_links, L::kShape},
      {"domain_devices", &F::domain_devices, L::kShape},
      {"pcie_bytes_per_s", &F::pcie_bytes_per_s, L::kNode},
      {"pcie", &F::pcie, L::kShape},
      {"nvls", &F::nvls, L::kShape},
      {"amd_cpu", &F::amd_cpu, L::kShape},
      {"ring_efficiency", &F::ring_efficiency, L::kNode},
      {"ring_start", &F::ring_start, L::kNode},
      {"reduce_efficiency", &F::reduce_efficiency, L::kNode},
      {"nvls_efficiency", &F::nvls_efficiency, L::kNode},
      {"inter_efficiency", &F::inter_efficiency, L::kCluster},
      {"tree_efficiency", &F::tree_efficiency, L::kShape},
      {"intra_latency", &F::intra_latency, L::kNode},
      {"inter_latency", &F::inter_latency, L::kCluster},
      {"send_latency_s", &F::send_latency_s, L::kNode},
      {"remote_latency_s", &F::remote_latency_s, L::kCluster},
      {"send_efficiency", &F::send_efficiency, L::kNode},
      {"send_small_bytes_per_s", &F::send_small_bytes_per_s, L::kNode},
      {"remote_send_efficiency", &F::remote_send_efficiency, L::kCluster},
      {"all_to_all_efficiency", &F::all_to_all_efficiency, L::kNode},
      {"all_to_all_latency_s", &F::all_to_all_latency_s, L::kNode},
      {"rank_latency_s", &F::rank_latency_s, L::kShape},
      {"message_s", &F::message_s, L::kNode},
      {"memory_traffic", &F::memory_traffic, L::kNode},
  };
  return table;
}

/// The one of NCCL's four rows that a device falls in. AMD's devices run a fork of it with the same model and no rows of their own.
GpuGeneration generation_of(const std::string& architecture) {
  if (architecture == "volta") return GpuGeneration::kVolta;
  if (architecture == "hopper") return GpuGeneration::kHopper;
  if (architecture == "blackwell" || architecture == "rubin") return GpuGeneration::kBlackwell;
  return GpuGeneration::kAmpere;
}

/// The rate that NCCL's search assumes of one link, from the data sheet's rate: 20 of 25 GB/s, 20.6 of 25, 40.1
/// of 50 (src/graph/topo.h).
double assumed_link(GpuGeneration generation) {
  constexpr double part[] = {0.8, 0.8, 0.824, 0.802};
  return part[static_cast<int>(generation)];
}

constexpr double kGiga = 1e9;
constexpr double kMicro = 1e-6;
constexpr double kSmallMessage = 64 << 20;

}  // namespace

Group group_of(int ranks, int inner, int devices_per_node) {
  Group group;
  group.ranks_per_node = std::clamp(devices_per_node / std::max(1, inner), 1, std::max(1, ranks));
  group.nodes = (ranks + group.ranks_per_node - 1) / group.ranks_per_node;
  group.groups_per_node = std::max(1, devices_per_node / group.ranks_per_node);
  return group;
}

CollectiveCost::Answer CollectiveCost::answer(double bytes) const {
  Answer best;
  if (ranks_ <= 1) return best;
  best.seconds = HUGE_VAL;  // without any line there is no way from rank to rank
  double least = HUGE_VAL;
  for (int i = 0; i < count_; ++i) {
    const Line& line = lines_[i];
    const double correction = line.tuned.algorithm == NcclAlgorithm::kTree ? nccl_tree_correction(line.tuned.protocol, bytes) : 1;
    const bool plateau = plateau_bytes_ > 0 && bytes >= plateau_bytes_ && line.tuned.algorithm == NcclAlgorithm::kRing &&
                         line.tuned.protocol == NcclProtocol::kSimple;
    const double raised = plateau ? nccl_ring_plateau(generation_) : 1;
    const double tuned = line.tuned.latency_us * raised + bytes / (1000 * line.tuned.bandwidth_gbs * correction);
    if (tuned >= least) continue;
    least = tuned;
    const double rate = std::min(line.bytes_per_s * correction, line.most_bytes_per_s);
    best = {std::max(line.latency_s * raised, ranks_s_) + bytes / rate, line.tuned.algorithm, line.tuned.protocol};
  }
  return best;
}

double CollectiveCost::bus_bytes_per_s(double bytes) const {
  const double s = seconds(bytes);
  return s > 0 && s < HUGE_VAL ? bytes / s * bus_factor(kind_, ranks_) : 0;
}

namespace {

/// What sets a constant busbw.* of a machine file; null: the name is none of these.
std::function<void(double)> measured_constant(const std::string& name, MeasuredFabric& to) {
  using M = MeasuredFabric;
  constexpr std::pair<std::string_view, std::optional<double> M::*> kRates[] = {
      {"busbw.all_reduce", &M::all_reduce},
      {"busbw.all_gather", &M::all_gather},
      {"busbw.reduce_scatter", &M::reduce_scatter},
      {"busbw.intra_all_reduce", &M::intra_all_reduce},
      {"busbw.intra_all_gather", &M::intra_all_gather},
      {"busbw.intra_reduce_scatter", &M::intra_reduce_scatter}};
  for (const auto& [known, member] : kRates)
    if (name == known) return [&to, member = member](double value) { to.*member = value; };
  if (name == "busbw.bytes") return [&to](double value) { to.bytes = value; };
  if (name == "busbw.nodes") return [&to](double value) { to.nodes = static_cast<int>(std::min(value, 1e9)); };
  return nullptr;
}

}  // namespace

Result<Fabric> Fabric::of(const Machine& machine, const MeasuredFabric& given) {
  Fabric fabric;
  MeasuredFabric told;  // by the machine's own file
  const auto refuse = [&](const std::string& what, const std::string& hint) {
    return Error{ExitCode::kUsage, fmt::format("machine `{}` {}", machine.id, what), hint, {}};
  };
  const auto rate = [](double x) { return std::isfinite(x) && x > 0; };
  if (machine.devices_per_node < 1 || machine.nodes < 1)
    return refuse(fmt::format("has {} nodes of {} devices", machine.nodes, machine.devices_per_node), "use 1 or more of each");
  if (machine.devices_per_node > 1 && !rate(machine.device.link_bytes_per_s))
    return refuse("has several devices a node and no link bandwidth", "give device.link_bandwidth in its machine file");
  if (machine.nodes > 1 && !rate(machine.inter_bytes_per_s))
    return refuse(
        fmt::format("has {} nodes of {}, and no network bandwidth says how they are joined", machine.nodes,
                    machine.devices_per_node == 1 ? std::string("1 device") : fmt::format("{} devices", machine.devices_per_node)),
        "set machine.inter_bandwidth (bytes/s), or machine.devices_per_node where all devices are in one node: in its machine file "
        "or with --set");
  fabric.constants_.nvls = 0;
  for (const auto& entry : machine.fabric) {
    const std::string& name = entry.first;  // not a structured binding: a lambda captures it
    const double value = entry.second;
    if (const auto constant = measured_constant(name, told); constant != nullptr) {
      if (!std::isfinite(value) || value < 0 || value > 1e18)
        return refuse(fmt::format("has fabric constant `{}` = {}", name, value), "constants are positive numbers");
      constant(value);
      continue;
    }
    const auto table = fabric_constants();
    const auto it = std::find_if(table.begin(), table.end(), [&](const FabricConstant& c) { return c.name == name; });
    if (it == table.end()) {
      std::string names;
      for (const FabricConstant& c : table) names += fmt::format("{}{}", names.empty() ? "" : " ", c.name);
      names += " busbw.[intra_](all_reduce|all_gather|reduce_scatter) busbw.bytes busbw.nodes";
      return refuse(fmt::format("states `{}` of its fabric", name), "one of: " + names);
    }
    if (!std::isfinite(value) || value < 0 || (value == 0 && it->level != FabricConstant::Level::kShape))
      return refuse(fmt::format("has fabric constant `{}` = {}", name, value), "constants are positive numbers");
    fabric.constants_.*(it->value) = value;
  }
  const bool asks = given != MeasuredFabric{};  // who asks knows more than the file
  const MeasuredFabric& measured = asks ? given : told;
  if (fabric.constants_.oversubscription < 1)
    return refuse(fmt::format("has oversubscription {}", fabric.constants_.oversubscription), "1 is a network without any");
  if (fabric.constants_.tree_efficiency <= 0)
    return refuse("has fabric constant `tree_efficiency` = 0", "constants are positive numbers");
  for (const auto& value : {measured.all_reduce, measured.all_gather, measured.reduce_scatter, measured.intra_all_reduce,
                            measured.intra_all_gather, measured.intra_reduce_scatter})
    if (value && !rate(*value)) return refuse(fmt::format("has a measured bus bandwidth of {}", *value), "give bytes/s, positive");
  if (!std::isfinite(measured.bytes) || measured.bytes < 0)
    return refuse(fmt::format("has a fabric measured with messages of {} bytes", measured.bytes), "0 stands for very large ones");
  fabric.devices_per_node_ = machine.devices_per_node;
  fabric.generation_ = generation_of(machine.device.architecture);
  fabric.link_bytes_per_s_ = machine.device.link_bytes_per_s;
  fabric.inter_bytes_per_s_ = machine.inter_bytes_per_s;
  fabric.memory_bytes_per_s_ = machine.device.memory_bytes_per_s;
  fabric.provenance_ = machine.device.provenance;
  // What a file says of more nodes than the machine is asked with holds for its network all the same.
  if (measured.nodes < 0 || (asks && measured.nodes > machine.nodes))
    return refuse(fmt::format("has {} nodes, its fabric was measured over {}", machine.nodes, measured.nodes), "0 stands for all");
  fabric.correct(measured, measured.nodes > 0 ? measured.nodes : machine.nodes);
  return fabric;
}

Provenance Fabric::provenance(bool across_nodes) const {
  constexpr int trust[] = {1, 0, 2, 3};  // measured before datasheet before fitted before transferred
  if (correction(CollectiveUse::kAllReduce, across_nodes).measured) return Provenance::kMeasured;
  Provenance least = Provenance::kMeasured;
  for (const FabricConstant& c : fabric_constants()) {
    if (c.level == FabricConstant::Level::kShape || (c.level == FabricConstant::Level::kCluster && !across_nodes)) continue;
    const auto it = provenance_.find(fmt::format("fabric.{}", c.name));
    const Provenance p = it == provenance_.end() ? Provenance::kTransferred : it->second;
    if (trust[static_cast<int>(p)] > trust[static_cast<int>(least)]) least = p;
  }
  return least;
}

Fabric::Rates Fabric::rates(const Group& group) const {
  Rates r;
  r.link = link_bytes_per_s_;
  // Direct links: a group sees those between its own members only.
  if (constants_.pair_links > 0 && devices_per_node_ > 1)
    r.link *= static_cast<double>(std::max(1, group.ranks_per_node - 1)) / (devices_per_node_ - 1);
  if (constants_.domain_devices > 0 && group.ranks_per_node > constants_.domain_devices) {
    r.link = constants_.pcie_bytes_per_s;
    r.pcie = true;
  }
  if (group.nodes > 1) {
    const double total = inter_bytes_per_s_ * devices_per_node_;
    const double rail = constants_.rails_per_node > 0 ? total / constants_.rails_per_node : inter_bytes_per_s_;
    // A rank reaches the rails beside it, and all groups of a node share its rails.
    r.node = std::min(total / group.groups_per_node, group.ranks_per_node * std::max(inter_bytes_per_s_, rail));
    if (constants_.leaf_nodes > 0 && group.nodes > constants_.leaf_nodes) r.node /= constants_.oversubscription;
  }
  return r;
}

NcclTopology Fabric::topology(const Group& group, const Rates& rates) const {
  NcclTopology t;
  t.ranks = group.ranks();
  t.nodes = group.nodes;
  t.generation = generation_;
  t.nvlink = constants_.pcie == 0 && !rates.pcie;
  t.ll128 = t.nvlink;
  t.amd_cpu = constants_.amd_cpu > 0;
  const double inside = rates.link * assumed_link(generation_) / kGiga;
  if (group.nodes == 1) {
    t.ring = t.tree = nccl_search(generation_, false, inside, inside);
    if (constants_.nvls > 0 && group.ranks_per_node > 2) t.nvls = nccl_search_nvls(generation_, group.ranks_per_node, inside);
    return t;
  }
  const double across = rates.node / kGiga;
  const double bus = group.ranks_per_node > 1 ? std::min(inside, across) : across;
  t.ring = nccl_search(generation_, true, bus, across / group.ranks_per_node);
  t.tree = t.ring;
  // Between two nodes each half of a tree crosses the network once: inside, a channel may run at up to twice the network's rate.
  if (group.ranks_per_node > 1) t.tree.intra = std::min(2 * t.tree.inter, inside / t.tree.channels);
  t.split_tree = group.ranks_per_node > 1;
  if (constants_.nvls > 0 && group.ranks_per_node == devices_per_node_ && group.ranks_per_node > 2) {
    t.nvls = {static_cast<double>(group.ranks_per_node), inside / group.ranks_per_node, across / group.ranks_per_node};
  }
  return t;
}

const Fabric::Correction& Fabric::correction(CollectiveUse kind, bool across) const {
  const auto& corrections = across ? across_ : within_;
  switch (kind) {
    case CollectiveUse::kAllReduce:
    case CollectiveUse::kReduce:
    case CollectiveUse::kBroadcast: return corrections[0];
    case CollectiveUse::kReduceScatter: return corrections[2];
    default: return corrections[1];
  }
}

/// A kind that was not measured is corrected as the one that is nearest to it.
void Fabric::correct(const MeasuredFabric& m, int nodes) {
  constexpr CollectiveUse kinds[] = {CollectiveUse::kAllReduce, CollectiveUse::kAllGather, CollectiveUse::kReduceScatter};
  constexpr size_t nearest[3][3] = {{0, 2, 1}, {1, 2, 0}, {2, 1, 0}};
  const double bytes = m.bytes > 0 ? m.bytes : 1e15;
  const auto learn = [&](const std::array<std::optional<double>, 3>& bus, const Group& group, std::array<Correction, 3>& learnt) {
    std::array<Correction, 3> own;
    for (size_t i = 0; i < 3; ++i) {
      if (!bus[i] || group.ranks() <= 1) continue;
      const double modelled = collective_seconds(kinds[i], bytes, group);
      if (!std::isfinite(modelled)) continue;  // no way from rank to rank
      const double wrong = bytes * bus_factor(kinds[i], group.ranks()) / *bus[i] / modelled;
      own[i] = {m.bytes > 0 ? wrong : 1, wrong, true};
    }
    for (size_t i = 0; i < 3; ++i)
      for (const size_t other : nearest[i])
        if (own[other].measured) {
          learnt[i] = own[other];
          break;
        }
  };
  if (nodes > 1) learn({m.all_reduce, m.all_gather, m.reduce_scatter}, {devices_per_node_, nodes}, across_);
  learn({m.intra_all_reduce, m.intra_all_gather, m.intra_reduce_scatter}, {devices_per_node_, 1}, within_);
}

/// Bus bandwidth that the links inside a node give a ring, bytes/s.
double Fabric::link_rate(CollectiveUse kind, const Group& group, const Rates& rates) const {
  const bool reduces = kind == CollectiveUse::kAllReduce || kind == CollectiveUse::kReduceScatter || kind == CollectiveUse::kReduce;
  if (rates.pcie) return rates.link;
  return rates.link * constants_.ring_efficiency / (1 + constants_.ring_start / group.ranks_per_node) *
         (reduces ? constants_.reduce_efficiency : 1);
}

/// Bus bandwidth of a ring over the group: of its slower level.
double Fabric::ring_rate(CollectiveUse kind, const Group& group, const Rates& rates) const {
  if (group.nodes == 1) return link_rate(kind, group, rates);
  const double network = rates.node * constants_.inter_efficiency;
  return group.ranks_per_node > 1 ? std::min(link_rate(kind, group, rates), network) : network;
}

/// Bytes/s of the full buffer that the fabric really gives one line of the table, large messages.
double Fabric::line_rate(CollectiveUse kind, const Group& group, const Rates& rates, const NcclTopology& t,
                         const NcclCell& cell) const {
  const bool across = group.nodes > 1;
  const double steps = bus_factor(kind, t.ranks);
  const double ring_link = link_rate(kind, group, rates);
  const double trees = rates.node * constants_.inter_efficiency * constants_.tree_efficiency;
  const double tuned = cell.bandwidth_gbs * kGiga;
  switch (cell.algorithm) {
    case NcclAlgorithm::kNvls:
      // In an all-reduce each link carries the buffer once each way whatever the number of ranks.
      return kind == CollectiveUse::kAllReduce ? rates.link * constants_.nvls_efficiency : std::min(tuned, ring_link / steps);
    case NcclAlgorithm::kNvlsTree: return std::min(rates.link * constants_.nvls_efficiency, trees * (group.nodes == 2 ? 1 : 0.5));
    case NcclAlgorithm::kTree: {
      const NcclGraph& g = t.tree;
      const double inside = ring_link / (g.channels * g.intra * kGiga);
      if (!across) return tuned * inside;
      const double outside = trees / (g.channels * g.inter * kGiga);
      return tuned * (group.ranks_per_node > 1 ? std::min(inside * std::max(1.0, g.intra / g.inter), outside) : outside);
    }
    default: {
      const NcclGraph& g = t.ring;
      const double expected = g.channels * (group.nodes <= 2 ? g.intra : g.inter) * kGiga;
      return tuned * ring_rate(kind, group, rates) / expected;
    }
  }
}

CollectiveCost Fabric::prepare(CollectiveUse kind, const Group& group, const CollectiveStyle& style) const {
  CollectiveCost cost;
  cost.kind_ = kind;
  cost.generation_ = generation_;
  cost.ranks_ = group.ranks();
  if (group.ranks() <= 1) return cost;
  if (kind == CollectiveUse::kAllToAll) return all_to_all(group);
  if (style.stepped) return by_steps(kind, group, style.choice);
  const Rates r = rates(group);
  const NcclTopology t = topology(group, r);
  const NcclTable table = nccl_table(kind, t);
  if (group.nodes > 1 && kind == CollectiveUse::kAllReduce) cost.plateau_bytes_ = 64 * t.ring.channels * t.ranks;
  const Correction& wrong = correction(kind, group.nodes > 1);
  if (group.nodes > 1 && (kind == CollectiveUse::kAllGather || kind == CollectiveUse::kReduceScatter))
    cost.ranks_s_ = (group.ranks() - 1) * constants_.rank_latency_s * wrong.latency;
  const double latency = (group.nodes > 1 ? constants_.inter_latency : constants_.intra_latency) * wrong.latency * kMicro;
  for (int i = 0; i < table.count; ++i) {
    const NcclCell& cell = table.cells[i];
    if (style.choice == AlgorithmChoice::kRing && cell.algorithm != NcclAlgorithm::kRing) continue;  // NCCL_ALGO=Ring
    // A tree over two nodes sends half of what a ring does, and could be as much faster. Where devices share an interface it is
    // not: 86 and 91 GB/s of bus bandwidth on nodes of 8 A100 with 100 GB/s (NVIDIA/nccl#1048, NVIDIA/nccl-tests#100).
    const bool held = cell.algorithm == NcclAlgorithm::kTree && group.nodes == 2 && constants_.rails_per_node > 0 &&
                      constants_.rails_per_node < devices_per_node_;
    const double most = held ? r.node * constants_.inter_efficiency / bus_factor(kind, t.ranks) : HUGE_VAL;
    cost.lines_[cost.count_++] = {cell, cell.latency_us * latency, line_rate(kind, group, r, t, cell) / wrong.seconds_per_byte,
                                  most / wrong.seconds_per_byte};
  }
  return cost;
}

/// Formula: steps * latency + bytes / rate + messages * kMessage_s, of the rank that moves most; of what is leveled (own_collectives.h) steps
///   between nodes and within them each at their own links. Under `auto` every algorithm that the group can have is a candidate, and
///   the fastest at a size is taken (`choose_collectives` does the same in plans).
CollectiveCost Fabric::by_steps(CollectiveUse kind, const Group& group, AlgorithmChoice choice) const {
  const int n = group.ranks();
  const CollectiveKind plans = kind == CollectiveUse::kAllReduce       ? CollectiveKind::kAllReduce
                               : kind == CollectiveUse::kReduceScatter ? CollectiveKind::kReduceScatter
                               : kind == CollectiveUse::kAllGather     ? CollectiveKind::kAllGather
                                                                       : CollectiveKind::kBroadcast;
  const Efficiency efficiency;
  const Way way{.nodes = group.nodes,
                .fewest_on_a_node = group.ranks_per_node,
                .link = link_bytes_per_s_ * efficiency.link,
                .inter = inter_bytes_per_s_ * efficiency.network};
  const StepRates rates = step_rates(efficiency, way);
  CollectiveCost cost;
  cost.kind_ = kind, cost.generation_ = generation_, cost.ranks_ = n;
  const auto per_byte = [&](double elements, double bytes_per_s) { return bytes_per_s > 0 ? elements / n / bytes_per_s : 0; };
  const auto add = [&](Algorithm algorithm) {
    const OwnSteps own = own_steps(plans, algorithm, n, n, group.nodes > 1 ? group.ranks_per_node : n);
    const bool levels = own.leveled && group.nodes > 1;
    const double latency =
        (levels ? (own.steps - own.steps_across) * efficiency.step_latency_s + own.steps_across * efficiency.network_latency_s
                : own.steps * rates.latency_s) +
        own.messages * kMessage_s;
    const double seconds_a_byte =
        levels ? per_byte(own.elements - own.elements_across, way.link) + per_byte(own.elements_across, way.inter)
               : per_byte(own.elements, rates.bytes_per_s);
    const double rate = seconds_a_byte > 0 ? 1 / seconds_a_byte : HUGE_VAL;
    cost.lines_[cost.count_++] = {{NcclAlgorithm::kPairwise, NcclProtocol::kSimple, latency / kMicro, rate / kGiga}, latency, rate};
  };
  if (choice != AlgorithmChoice::kAuto) {
    add(algorithm_among(choice, plans, n));
    return cost;
  }
  for (const Algorithm algorithm : {Algorithm::kRing, Algorithm::kDirect, Algorithm::kTree}) add(algorithm);
  if (n > 2 && std::has_single_bit(static_cast<unsigned>(n))) add(Algorithm::kHalvingDoubling);
  if (group.nodes > 1 && group.ranks_per_node > 1) add(Algorithm::kHierarchical);
  return cost;
}

double Fabric::by_node_seconds(const RowLevels& levels) const {
  const Efficiency efficiency;
  const double within = link_bytes_per_s_ * efficiency.link, across = inter_bytes_per_s_ * efficiency.network;
  const auto seconds = [](int64_t steps, double latency_s, int64_t bytes, double bytes_per_s) {
    return static_cast<double>(steps) * latency_s + (bytes_per_s > 0 ? static_cast<double>(bytes) / bytes_per_s : 0);
  };
  return seconds(levels.steps() - levels.steps_across(), efficiency.step_latency_s, levels.even_bytes_within(), within) +
         seconds(levels.steps_across(), efficiency.network_latency_s, levels.even_bytes_across(), across);
}

/// Every rank sends its part to every other, all at once: peers of the node over the links, the rest over the network.
CollectiveCost Fabric::all_to_all(const Group& group) const {
  CollectiveCost cost;
  cost.kind_ = CollectiveUse::kAllToAll;
  cost.generation_ = generation_;
  cost.ranks_ = group.ranks();
  const Rates r = rates(group);
  const double n = group.ranks();
  const double local = (group.ranks_per_node - 1) / n / (r.link * (r.pcie ? 1 : constants_.all_to_all_efficiency));
  double seconds_per_byte = group.ranks_per_node > 1 ? local : 0;
  double latency = constants_.all_to_all_latency_s;
  if (group.nodes > 1) {
    const Correction& wrong = correction(CollectiveUse::kAllToAll, true);
    const double network = r.node / group.ranks_per_node * constants_.inter_efficiency / wrong.seconds_per_byte;
    seconds_per_byte = std::max(seconds_per_byte, (n - group.ranks_per_node) / n / network);
    latency = std::max(latency, constants_.remote_latency_s * wrong.latency);
  }
  latency += (n - 2) * constants_.message_s;
  const NcclCell cell{NcclAlgorithm::kPairwise, NcclProtocol::kSimple, latency / kMicro, 1 / (seconds_per_byte * kGiga)};
  cost.lines_[cost.count_++] = {cell, latency, 1 / seconds_per_byte};
  return cost;
}

double Fabric::local_send_seconds(double bytes) const {
  const double link =
      constants_.pair_links > 0 && devices_per_node_ > 1 ? link_bytes_per_s_ / (devices_per_node_ - 1) : link_bytes_per_s_;
  if (constants_.domain_devices > 0 && devices_per_node_ > constants_.domain_devices)
    return constants_.send_latency_s + bytes / constants_.pcie_bytes_per_s;  // some neighbours are in different domains
  // Longer messages get more channels, and are done no sooner than the longest that does not.
  const double few_channels = std::min(bytes, kSmallMessage) / std::min(constants_.send_small_bytes_per_s, link);
  return constants_.send_latency_s + std::max(bytes / (link * constants_.send_efficiency), few_channels);
}

double Fabric::remote_send_seconds(double bytes, double sharing) const {
  const double total = inter_bytes_per_s_ * devices_per_node_;
  const double rail = constants_.rails_per_node > 0 ? total / constants_.rails_per_node : inter_bytes_per_s_;
  // A message alone has too few channels for its rail; several together fill what they share.
  const double rate = std::min(std::max(inter_bytes_per_s_, rail) * constants_.remote_send_efficiency,
                               total / std::max(1.0, sharing) * constants_.inter_efficiency);
  const Correction& wrong = correction(CollectiveUse::kAllGather, true);
  return constants_.remote_latency_s * wrong.latency + bytes / rate * wrong.seconds_per_byte;
}

Contention Fabric::contention(CollectiveUse kind, const Group& group) const {
  Contention c;
  if (group.ranks() <= 1) return c;
  const Rates r = rates(group);
  const NcclTopology t = topology(group, r);
  // What passes each device: all of a ring's traffic, be it bound for the next device or for the next node.
  const double through = ring_rate(kind, group, r) / std::max(1.0, correction(kind, group.nodes > 1).seconds_per_byte);
  const double traffic = std::min(0.5, constants_.memory_traffic * through / memory_bytes_per_s_);
  c.compute = 1 / (1 - traffic);
  // The collective waits for the same memory: it keeps its rate until both together ask for more than there is.
  c.communication = 1 + traffic / 2;
  // Twice the channels that the search found are used (the log's "coll channels"); a thread block each.
  const bool nvls = t.nvls.channels > 0 && group.nodes == 1 && kind == CollectiveUse::kAllReduce;
  c.taken_sms = kind == CollectiveUse::kAllToAll ? 8 : nvls ? 16 : std::min(32.0, 2 * t.ring.channels);
  return c;
}

}  // namespace shardlab::simulator
