// Seconds of messages and collectives: derived cases, monotony, sharing, what is refused.
#include "simulator/interpreter/fabric.h"

#include <cmath>
#include <limits>
#include <map>

#include "plan/automatic.h"
#include "plan/collective_steps.h"
#include "simulator/interpreter/datasheet_rates.h"
#include "simulator/interpreter/own_collectives.h"
#include "tests/namespaces.h"
#include "tests/test.h"

using namespace shardlab;
using namespace shardlab::testing;

namespace {

Machine cluster() {
  Machine m;
  m.id = "cluster";
  m.devices_per_node = 8;
  m.nodes = 16;
  m.inter_bytes_per_s = 50e9;
  m.device.id = "hopper";
  m.device.architecture = "hopper";
  m.device.link_bytes_per_s = 450e9;
  m.device.memory_bytes_per_s = 3.35e12;
  m.device.peak_flops = {{"bf16", 1e15}};
  m.fabric = {{"ring_efficiency", 0.8},  {"ring_start", 1e-9}, {"reduce_efficiency", 1},
              {"inter_efficiency", 0.9}, {"intra_latency", 1}, {"inter_latency", 1}};
  return m;
}

Fabric fabric_of(const Machine& m, const MeasuredFabric& measured = {}) {
  const auto fabric = Fabric::of(m, measured);
  REQUIRE(fabric.ok());
  return *fabric;
}

constexpr double kHuge = 64e9;

}  // namespace

TEST_CASE("large collectives reach the bus bandwidth of their slowest level") {
  const Fabric f = fabric_of(cluster());
  const auto bus = [&](CollectiveUse kind, Group group) { return f.prepare(kind, group).bus_bytes_per_s(kHuge); };
  CHECK(bus(CollectiveUse::kAllGather, {8, 1}) == Approx(0.8 * 450e9).epsilon(0.01));
  CHECK(bus(CollectiveUse::kReduceScatter, {4, 1}) == Approx(0.8 * 450e9).epsilon(0.01));
  CHECK(bus(CollectiveUse::kAllReduce, {8, 1}) == Approx(0.8 * 450e9).epsilon(0.01));
  // A group over whole nodes uses all rails, one rank a node uses one; eight such groups at once still have one each.
  CHECK(bus(CollectiveUse::kAllGather, {8, 4}) == Approx(0.9 * 400e9).epsilon(0.01));
  CHECK(bus(CollectiveUse::kAllGather, {1, 4}) == Approx(0.9 * 50e9).epsilon(0.01));
  CHECK(bus(CollectiveUse::kAllGather, {1, 4, 8}) == Approx(0.9 * 50e9).epsilon(0.01));
  CHECK(bus(CollectiveUse::kAllGather, {2, 4, 4}) == Approx(0.9 * 100e9).epsilon(0.01));
  CHECK(f.collective_seconds(CollectiveUse::kAllReduce, 1e9, {1, 1}) == 0);
}

TEST_CASE("rails, oversubscription and direct links") {
  Machine m = cluster();
  m.fabric["rails_per_node"] = 2;  // of 200 GB/s each, shared by four devices
  const auto bus = [&](Group group) { return fabric_of(m).prepare(CollectiveUse::kAllGather, group).bus_bytes_per_s(kHuge); };
  CHECK(bus({1, 4, 1}) == Approx(0.9 * 200e9).epsilon(0.01));
  CHECK(bus({1, 4, 8}) == Approx(0.9 * 50e9).epsilon(0.01));
  m = cluster();
  m.fabric["oversubscription"] = 4;
  m.fabric["leaf_nodes"] = 4;
  CHECK(bus({1, 4, 8}) == Approx(0.9 * 50e9).epsilon(0.01));
  CHECK(bus({1, 8, 8}) == Approx(0.9 * 12.5e9).epsilon(0.01));
  m = cluster();
  m.fabric["pair_links"] = 1;
  CHECK(bus({2, 1}) == Approx(0.8 * 450e9 / 7).epsilon(0.01));
  CHECK(bus({8, 1}) == Approx(0.8 * 450e9).epsilon(0.01));
  m.fabric["send_efficiency"] = 0.8;
  CHECK(fabric_of(m).local_send_seconds(1e9) == Approx(1e9 / (0.8 * 450e9 / 7)).epsilon(0.01));
}

TEST_CASE("a group that spans several bridged pairs goes over PCIe") {
  Machine m = cluster();
  m.fabric["domain_devices"] = 2;
  m.fabric["pcie_bytes_per_s"] = 20e9;
  const auto bus = [&](Group group) { return fabric_of(m).prepare(CollectiveUse::kAllReduce, group).bus_bytes_per_s(kHuge); };
  CHECK(bus({2, 1}) == Approx(0.8 * 450e9).epsilon(0.01));
  CHECK(bus({3, 1}) == Approx(20e9).epsilon(0.01));
  CHECK(bus({8, 2}) == Approx(20e9).epsilon(0.01));
  CHECK(fabric_of(m).local_send_seconds(1e9) == Approx(1e9 / 20e9).epsilon(0.01));
}

TEST_CASE("a measured fabric replaces the model's rates") {
  MeasuredFabric measured;
  measured.all_gather = 100e9;
  measured.intra_all_reduce = 200e9;
  measured.bytes = 0;  // of messages so large that latency does not count
  const Fabric f = fabric_of(cluster(), measured);
  const auto bus = [&](CollectiveUse kind, Group group) { return f.prepare(kind, group).bus_bytes_per_s(1e12); };
  CHECK(bus(CollectiveUse::kAllGather, {8, 4}) == Approx(100e9).epsilon(0.01));
  CHECK(bus(CollectiveUse::kReduceScatter, {8, 4}) == Approx(100e9).epsilon(0.01));
  CHECK(bus(CollectiveUse::kAllReduce, {8, 4}) == Approx(100e9).epsilon(0.01));
  CHECK(bus(CollectiveUse::kAllGather, {1, 4, 8}) == Approx(12.5e9).epsilon(0.01));
  CHECK(bus(CollectiveUse::kAllReduce, {8, 1}) == Approx(200e9).epsilon(0.01));
  CHECK(f.provenance(true) == Provenance::kMeasured);
  CHECK(fabric_of(cluster()).provenance(true) == Provenance::kTransferred);
}

TEST_CASE("a rate measured on messages of a stated size is met at that size") {
  MeasuredFabric measured;
  measured.all_gather = 44e9;
  measured.bytes = 256 << 20;
  for (const int nodes : {2, 8, 16}) {
    Machine m = cluster();
    m.nodes = nodes;
    const Fabric f = fabric_of(m, measured), modelled = fabric_of(m);
    CHECK(f.prepare(CollectiveUse::kAllGather, {8, nodes}).bus_bytes_per_s(256 << 20) == Approx(44e9).epsilon(1e-9));
    // Every other group and size is as much slower than thought.
    const auto slower = [&](CollectiveUse kind, double bytes, const Group& group) {
      return f.collective_seconds(kind, bytes, group) / modelled.collective_seconds(kind, bytes, group);
    };
    const double wrong = slower(CollectiveUse::kAllGather, 256 << 20, {8, nodes});
    CHECK(slower(CollectiveUse::kAllGather, 1 << 20, {8, 2}) == Approx(wrong));
    CHECK(slower(CollectiveUse::kAllReduce, 4e9, {1, 2, 8}) == Approx(wrong));
    CHECK(f.send_seconds(1e6, true) == Approx(wrong * modelled.send_seconds(1e6, true)));
    CHECK(slower(CollectiveUse::kAllGather, 1 << 20, {8, 1}) == 1);  // within a node nothing was measured
  }
}

TEST_CASE("more bytes and more ranks never take less time") {
  const Fabric f = fabric_of(cluster());
  for (const CollectiveUse kind : {CollectiveUse::kAllReduce, CollectiveUse::kReduceScatter, CollectiveUse::kAllGather,
                                   CollectiveUse::kBroadcast, CollectiveUse::kReduce, CollectiveUse::kAllToAll})
    for (const Group group : {Group{2, 1}, Group{8, 1}, Group{1, 2}, Group{1, 16, 8}, Group{8, 2}, Group{8, 16}}) {
      const CollectiveCost cost = f.prepare(kind, group);
      double before = 0;
      for (double bytes = 1024; bytes < 1e10; bytes *= 2) {
        const double s = cost.seconds(bytes);
        CHECK(s > 0);
        CHECK(s >= 0.8 * before);  // the library changes its mind by its own table, not by the fabric's
        before = s;
      }
    }
  CHECK(f.collective_seconds(CollectiveUse::kAllToAll, 1e9, {8, 2}) > f.collective_seconds(CollectiveUse::kAllToAll, 1e9, {8, 1}));
  CHECK(f.send_seconds(1e9, true) > f.send_seconds(1e9, false));
  CHECK(f.send_seconds(1e9, true, 8) == Approx(f.send_seconds(1e9, true, 1)));
}

TEST_CASE("a tree over two nodes outruns the network, but not where devices share its interfaces") {
  Machine m = cluster();
  m.device.architecture = "ampere";
  m.inter_bytes_per_s = 12.5e9;  // eight devices, 100 GB/s a node
  m.fabric["nvls"] = 0;
  const auto bus = [&](double rails, int nodes) {
    m.fabric["rails_per_node"] = rails;
    const CollectiveCost c = fabric_of(m).prepare(CollectiveUse::kAllReduce, {8, nodes, 1});
    if (nodes == 2) CHECK(c.answer(kHuge).algorithm == NcclAlgorithm::kTree);
    return c.bus_bytes_per_s(kHuge);
  };
  CHECK(bus(8, 2) > 1.2 * 100e9);
  CHECK(bus(4, 2) == Approx(0.9 * 100e9).epsilon(0.001));
  CHECK(bus(4, 2) < bus(8, 2));
  CHECK(bus(4, 4) == Approx(bus(8, 4)));
}

TEST_CASE("collectives of our own take what the cost model of plans says of the same steps") {
  const Machine m = cluster();
  const Fabric fabric = fabric_of(m);
  const DatasheetRates rates(m, Precision::kBf16);
  const std::pair<CollectiveUse, CollectiveKind> kinds[] = {{CollectiveUse::kAllReduce, CollectiveKind::kAllReduce},
                                                            {CollectiveUse::kReduceScatter, CollectiveKind::kReduceScatter},
                                                            {CollectiveUse::kAllGather, CollectiveKind::kAllGather},
                                                            {CollectiveUse::kBroadcast, CollectiveKind::kBroadcast}};
  for (const auto& [use, kind] : kinds)
    for (const auto& [size, inner] : {std::pair{2, 1}, {8, 1}, {16, 8}, {64, 1}, {4, 2}})
      for (const AlgorithmChoice choice : {AlgorithmChoice::kRing, AlgorithmChoice::kHalvingDoubling, AlgorithmChoice::kDirect,
                                           AlgorithmChoice::kTree, AlgorithmChoice::kHierarchical}) {
        const Group group = group_of(size, inner, m.devices_per_node);
        if (choice == AlgorithmChoice::kHierarchical && (group.nodes == 1 || group.ranks_per_node == 1)) continue;
        std::vector<int> ranks;
        for (int i = 0; i < size; ++i) ranks.push_back(i * inner);
        const int64_t elements = int64_t{size} << 20;
        const OwnSteps own =
            own_steps(kind, algorithm_among(choice, kind, size), elements, size, group.nodes > 1 ? group.ranks_per_node : size);
        const double expected =
            rates.in_turn_seconds({own.steps, 4 * own.elements, own.steps_across, 4 * own.elements_across, own.leveled},
                                  rates.way_between(ranks)) +
            own.messages * kMessage_s;
        INFO(name_of(use) << " of " << size << " ranks, " << name_of(choice));
        CHECK(fabric.collective_seconds(use, static_cast<double>(4 * elements), group, {true, choice}) == Approx(expected));
      }
}

TEST_CASE("steps of our own collectives: what goes between nodes, and messages of direct exchanges") {
  const auto all_reduce = CollectiveKind::kAllReduce;
  // 16 ranks, 8 a node.
  const OwnSteps halves = own_steps(all_reduce, Algorithm::kHalvingDoubling, 1600, 16, 8);
  CHECK((halves.leveled && halves.steps == 8 && halves.elements == 2 * 1500 && halves.messages == 0));
  CHECK((halves.steps_across == 2 && halves.elements_across == 2 * 800));  // half of the buffer goes to the rank 8 away
  const OwnSteps tree = own_steps(all_reduce, Algorithm::kTree, 1600, 16, 8);
  CHECK(
      (tree.leveled && tree.steps == 8 && tree.steps_across == 2 && tree.elements == 8 * 1600 && tree.elements_across == 2 * 1600));
  const OwnSteps direct = own_steps(all_reduce, Algorithm::kDirect, 1600, 16, 8);
  CHECK((direct.leveled && direct.steps == 2 && direct.messages == 2 * 14));
  CHECK((direct.elements == 2 * 1500 && direct.elements_across == 2 * 800));  // 8 of 15 peers
  const OwnSteps levels = own_steps(all_reduce, Algorithm::kHierarchical, 1600, 16, 8);
  CHECK((levels.leveled && levels.steps == 2 * 8 && levels.steps_across == 2));
  CHECK((levels.elements == 2 * 1500 && levels.elements_across == 2 * 100));
  const OwnSteps ring = own_steps(all_reduce, Algorithm::kRing, 1600, 16, 8);
  CHECK((!ring.leveled && ring.steps == 30 && ring.elements == 2 * 1500 && ring.messages == 0));
  CHECK_FALSE(own_steps(all_reduce, Algorithm::kDirect, 1600, 8, 8).leveled);
}

TEST_CASE("collective_algorithm auto takes what is predicted to take least, over sizes, ranks and machines") {
  Machine near = cluster(), fast = cluster(), slow = cluster(), plain = cluster();
  fast.inter_bytes_per_s = 100e9;  // the rails of a node carry more than one device's links
  slow.inter_bytes_per_s = 125e6;  // 1 Gbit/s
  plain.devices_per_node = 1;
  std::map<AlgorithmChoice, int> chosen;
  for (const Machine* m : {&near, &fast, &slow, &plain}) {
    const Fabric fabric = fabric_of(*m);
    for (const int size : {2, 3, 4, 6, 8, 12, 16, 24, 64, 96, 128, 160})
      for (const double bytes : {256.0, 64e3, 4e6, 1e9})
        for (const CollectiveUse use : {CollectiveUse::kAllReduce, CollectiveUse::kReduceScatter, CollectiveUse::kAllGather}) {
          const Group group = group_of(size, 1, m->devices_per_node);
          if (group.ranks() != size) continue;  // uneven over nodes
          double least = HUGE_VAL;
          AlgorithmChoice best = AlgorithmChoice::kRing;
          for (const AlgorithmChoice choice : {AlgorithmChoice::kRing, AlgorithmChoice::kHalvingDoubling, AlgorithmChoice::kDirect,
                                               AlgorithmChoice::kTree, AlgorithmChoice::kHierarchical}) {
            if (choice == AlgorithmChoice::kHalvingDoubling && (size & (size - 1)) != 0) continue;
            if (choice == AlgorithmChoice::kHierarchical && (group.nodes == 1 || group.ranks_per_node == 1)) continue;
            const double seconds = fabric.collective_seconds(use, bytes, group, {true, choice});
            if (seconds < least) least = seconds, best = choice;
          }
          INFO(m->devices_per_node << " a node, " << m->inter_bytes_per_s << " bytes/s: " << name_of(use) << " of " << bytes
                                   << " bytes among " << size);
          CHECK(fabric.collective_seconds(use, bytes, group, {true, AlgorithmChoice::kAuto}) == Approx(least).epsilon(1e-12));
          ++chosen[best];
        }
  }
  CHECK(chosen.size() == 5);  // each is the best of something
  // Two nodes with a slow link between them: in two levels each rank sends an eighth as much across.
  const Fabric fabric = fabric_of(slow);
  const auto seconds = [&](AlgorithmChoice choice) {
    return fabric.collective_seconds(CollectiveUse::kAllReduce, 64e6, {8, 2}, {true, choice});
  };
  CHECK(seconds(AlgorithmChoice::kHierarchical) < 0.6 * seconds(AlgorithmChoice::kRing));
  CHECK(seconds(AlgorithmChoice::kAuto) == seconds(AlgorithmChoice::kHierarchical));
}

TEST_CASE("of NCCL a choice of rings leaves its rings alone, and is never faster than what is fastest") {
  Machine m = cluster();
  m.fabric["nvls"] = 1;
  const Fabric fabric = fabric_of(m);
  const Group node{8, 1}, all{8, 16};
  for (const Group& group : {node, all}) {
    const CollectiveCost rings = fabric.prepare(CollectiveUse::kAllReduce, group, {false, AlgorithmChoice::kRing});
    const CollectiveCost any = fabric.prepare(CollectiveUse::kAllReduce, group);
    REQUIRE(rings.lines() > 0);
    CHECK(rings.lines() < any.lines());
    for (int i = 0; i < rings.lines(); ++i) CHECK(rings.line(i).tuned.algorithm == NcclAlgorithm::kRing);
  }
  // Over many nodes a tree has fewer steps: what is small is slower by rings.
  CHECK(fabric.collective_seconds(CollectiveUse::kAllReduce, 8192, all, {false, AlgorithmChoice::kRing}) >
        fabric.collective_seconds(CollectiveUse::kAllReduce, 8192, all));
}

TEST_CASE("messages of one node share its rails") {
  Machine m = cluster();  // eight devices of 50 GB/s each to the network
  m.fabric["rails_per_node"] = 4;
  m.fabric["remote_send_efficiency"] = 0.66;
  m.fabric["inter_efficiency"] = 0.9;
  const Fabric f = fabric_of(m);
  const auto rate = [&](double sharing) { return 1e12 / f.send_seconds(1e12, true, sharing); };
  CHECK(rate(1) == Approx(0.66 * 100e9).epsilon(0.001));  // alone: few channels on a rail of 100 GB/s
  CHECK(rate(4) == Approx(0.66 * 100e9).epsilon(0.001));
  CHECK(rate(8) == Approx(0.9 * 50e9).epsilon(0.001));  // two to a rail fill it as well as rings do
}

TEST_CASE("groups by where their ranks are") {
  const auto is = [](Group g, int ranks_per_node, int nodes, int groups) {
    return g.ranks_per_node == ranks_per_node && g.nodes == nodes && g.groups_per_node == groups;
  };
  CHECK(is(group_of(8, 1, 8), 8, 1, 1));
  CHECK(is(group_of(2, 1, 8), 2, 1, 4));
  CHECK(is(group_of(16, 8, 8), 1, 16, 8));
  CHECK(is(group_of(16, 4, 8), 2, 8, 4));
  CHECK(is(group_of(16, 1, 8), 8, 2, 1));
  CHECK(is(group_of(4, 64, 8), 1, 4, 8));
  CHECK(is(group_of(1, 1, 8), 1, 1, 8));
}

TEST_CASE("computing and communicating slow each other") {
  const Fabric f = fabric_of(cluster());
  const Contention inside = f.contention(CollectiveUse::kAllReduce, {8, 1});
  const Contention across = f.contention(CollectiveUse::kAllReduce, {1, 16, 8});
  CHECK(inside.compute > across.compute);
  CHECK(across.compute > 1);
  CHECK(inside.compute < 2);
  CHECK(inside.communication > 1);
  CHECK(inside.taken_sms >= 8);
  CHECK(inside.taken_sms <= 32);
  CHECK(f.contention(CollectiveUse::kAllReduce, {1, 1}).compute == 1);
}

TEST_CASE("ranks that nothing joins never meet") {
  Machine m = cluster();
  m.nodes = m.devices_per_node = 1;
  m.device.link_bytes_per_s = m.inter_bytes_per_s = 0;
  MeasuredFabric measured;
  measured.all_reduce = 1e9;
  for (const Fabric& f : {fabric_of(m), fabric_of(m, measured)})
    for (const Group group : {Group{2, 1}, Group{1, 2}, Group{4, 2}}) {
      CHECK(f.collective_seconds(CollectiveUse::kAllReduce, 1e6, group) == std::numeric_limits<double>::infinity());
      CHECK(f.prepare(CollectiveUse::kAllGather, group).bus_bytes_per_s(1e6) == 0);
    }
}

TEST_CASE("what a fabric refuses") {
  Machine m = cluster();
  m.fabric["rails"] = 8;
  CHECK(Fabric::of(m).error().message == "machine `cluster` states `rails` of its fabric");
  m = cluster();
  m.fabric["ring_efficiency"] = std::numeric_limits<double>::quiet_NaN();
  CHECK_FALSE(Fabric::of(m).ok());
  m = cluster();
  m.fabric["oversubscription"] = 0.5;
  CHECK_FALSE(Fabric::of(m).ok());
  m = cluster();
  m.device.link_bytes_per_s = 0;
  CHECK(Fabric::of(m).error().message == "machine `cluster` has several devices a node and no link bandwidth");
  m = cluster();
  m.inter_bytes_per_s = 0;
  CHECK_FALSE(Fabric::of(m).ok());
  MeasuredFabric measured;
  measured.all_reduce = -1;
  CHECK_FALSE(Fabric::of(cluster(), measured).ok());
}

TEST_CASE("a gather or a scatter across nodes takes the latency of every rank and the time of its bytes") {
  Machine m = cluster();
  const Fabric plain = fabric_of(m);
  m.fabric["rank_latency_s"] = 50e-6;
  const Fabric f = fabric_of(m);
  m.fabric["rank_latency_s"] = 1e-9;
  const Fabric quick = fabric_of(m);
  const Group across{8, 4}, within{8, 1};
  for (const CollectiveUse kind : {CollectiveUse::kAllGather, CollectiveUse::kReduceScatter}) {
    const auto bytes_s = [&](double bytes) {
      return bytes * bus_factor(kind, across.ranks()) / plain.prepare(kind, across).bus_bytes_per_s(1e15);
    };
    for (const double bytes : {1e9, 1e10})
      CHECK(f.collective_seconds(kind, bytes, across) == Approx(31 * 50e-6 + bytes_s(bytes)).epsilon(1e-3));
    CHECK(f.collective_seconds(kind, 1, across) == Approx(31 * 50e-6));
    CHECK(quick.collective_seconds(kind, 1e6, across) == plain.collective_seconds(kind, 1e6, across));
    CHECK(f.collective_seconds(kind, 1e6, within) == plain.collective_seconds(kind, 1e6, within));
  }
  const auto reduce = [&](const Fabric& fabric) { return fabric.collective_seconds(CollectiveUse::kAllReduce, 1e6, across); };
  CHECK(reduce(f) == reduce(plain));
}

TEST_CASE("trees across nodes have a rate of the network of their own") {
  Machine m = cluster();
  m.fabric["nvls"] = 1;
  m.fabric["inter_efficiency"] = 0.5;
  const Fabric plain = fabric_of(m);
  m.fabric["tree_efficiency"] = 0.5;
  const Fabric f = fabric_of(m);
  const auto rate = [](const Fabric& fabric, CollectiveUse kind, int nodes, NcclAlgorithm algorithm) {
    const CollectiveCost cost = fabric.prepare(kind, {8, nodes});
    for (int i = 0; i < cost.lines(); ++i)
      if (cost.line(i).tuned.algorithm == algorithm && cost.line(i).tuned.protocol == NcclProtocol::kSimple)
        return cost.line(i).bytes_per_s;
    return 0.0;
  };
  for (const int nodes : {2, 4}) {
    const double all = 0.5 * 8 * 50e9 * (nodes == 2 ? 1 : 0.5);  // the network of a node; up and down the tree beyond two
    CHECK(rate(plain, CollectiveUse::kAllReduce, nodes, NcclAlgorithm::kNvlsTree) == Approx(all));
    CHECK(rate(f, CollectiveUse::kAllReduce, nodes, NcclAlgorithm::kNvlsTree) == Approx(0.5 * all));
    CHECK(rate(f, CollectiveUse::kAllReduce, nodes, NcclAlgorithm::kTree) ==
          Approx(0.5 * rate(plain, CollectiveUse::kAllReduce, nodes, NcclAlgorithm::kTree)));
    for (const CollectiveUse kind : {CollectiveUse::kAllReduce, CollectiveUse::kAllGather})
      CHECK(rate(f, kind, nodes, NcclAlgorithm::kRing) == rate(plain, kind, nodes, NcclAlgorithm::kRing));
  }
  for (const double value : {-1.0, 0.0}) {
    m.fabric["tree_efficiency"] = value;
    CHECK_FALSE(Fabric::of(m).ok());
  }
}

TEST_CASE("what was measured of a ring across nodes corrects the latency of its ranks too") {
  Machine m = cluster();
  m.fabric["rank_latency_s"] = 50e-6;
  const double bytes = 1 << 30;
  const Group all{8, m.nodes};
  const double modelled = fabric_of(m).collective_seconds(CollectiveUse::kAllGather, bytes, all);
  MeasuredFabric measured;
  measured.all_gather = bytes * bus_factor(CollectiveUse::kAllGather, all.ranks()) / (1.5 * modelled);
  measured.bytes = bytes;
  const auto corrected = Fabric::of(m, measured);
  REQUIRE(corrected.ok());
  CHECK(corrected->collective_seconds(CollectiveUse::kAllGather, bytes, all) == Approx(1.5 * modelled));
  CHECK(corrected->collective_seconds(CollectiveUse::kAllGather, 1, all) ==
        Approx(1.5 * fabric_of(m).collective_seconds(CollectiveUse::kAllGather, 1, all)));
}
