// NCCL's model, held to what NCCL itself printed and to its constants.
#include "simulator/interpreter/nccl_model.h"

#include "tests/namespaces.h"
#include "tests/test.h"

using namespace shardlab;
using namespace shardlab::testing;

namespace {

NcclCell cell(const NcclTable& table, NcclAlgorithm algorithm, NcclProtocol protocol) {
  for (int i = 0; i < table.count; ++i)
    if (table.cells[i].algorithm == algorithm && table.cells[i].protocol == protocol) return table.cells[i];
  return {};
}

constexpr auto kTree = NcclAlgorithm::kTree;
constexpr auto kRing = NcclAlgorithm::kRing;
constexpr auto kLl = NcclProtocol::kLl;
constexpr auto kLl128 = NcclProtocol::kLl128;
constexpr auto kSimple = NcclProtocol::kSimple;

}  // namespace

// NCCL 2.29.7, two ranks on two nodes over sockets (one RTX 5090 shown as two hosts), Intel host. The log prints one decimal; its
// rings carry 2.4 GB/s, its trees twice that within a node, where a channel may run at up to twice the network's rate.
TEST_CASE("the table that NCCL printed for two nodes over sockets") {
  NcclTopology t;
  t.ranks = t.nodes = 2;
  t.generation = GpuGeneration::kBlackwell;
  t.nvlink = false;
  t.ll128 = false;
  t.split_tree = false;
  t.ring = {2, 1.2, 1.2};
  t.tree = {2, 2.4, 1.2};
  const auto holds = [&](CollectiveUse kind, NcclAlgorithm a, NcclProtocol p, double latency, double bandwidth) {
    INFO(name_of(kind) << " " << name_of(a) << " " << name_of(p));
    const NcclCell c = cell(nccl_table(kind, t), a, p);
    CHECK(c.latency_us == Approx(latency).margin(0.0501));
    CHECK(c.bandwidth_gbs == Approx(bandwidth).margin(0.0501));
  };
  holds(CollectiveUse::kBroadcast, kRing, kLl, 9.3, 1.2);
  holds(CollectiveUse::kBroadcast, kRing, kSimple, 22.4, 2.4);
  holds(CollectiveUse::kReduce, kRing, kLl, 9.3, 1.2);
  holds(CollectiveUse::kAllGather, kRing, kLl, 11.6, 2.4);
  holds(CollectiveUse::kAllGather, kRing, kSimple, 22.4, 4.8);
  holds(CollectiveUse::kReduceScatter, kRing, kSimple, 22.4, 4.8);
  holds(CollectiveUse::kReduceScatter, NcclAlgorithm::kPat, kSimple, 17.6, 3.6);
  holds(CollectiveUse::kAllReduce, kTree, kLl, 16.8, 0.5);
  holds(CollectiveUse::kAllReduce, kTree, kSimple, 36.4, 1.9);
  holds(CollectiveUse::kAllReduce, kRing, kLl, 16.6, 1.2);
  holds(CollectiveUse::kAllReduce, kRing, kSimple, 36.4, 2.4);
  // LL128 is off over sockets: its column reads 0.0 and it is no candidate.
  CHECK(cell(nccl_table(CollectiveUse::kAllReduce, t), kRing, kLl128).bandwidth_gbs == 0);
  // The same log's choice for broadcasts: LL up to 16 KiB, Simple from 32 KiB.
  const NcclTable broadcast = nccl_table(CollectiveUse::kBroadcast, t);
  const auto time = [&](NcclProtocol p, double bytes) {
    return nccl_time_us(CollectiveUse::kBroadcast, t, cell(broadcast, kRing, p), bytes);
  };
  CHECK(time(kLl, 16384) < time(kSimple, 16384));
  CHECK(time(kLl, 32768) > time(kSimple, 32768));
}

TEST_CASE("latencies of an all-reduce on 8 devices with NVLink") {
  NcclTopology t;
  t.ranks = 8;
  t.ring = t.tree = {12, 30, 30};
  t.nvls = {8, 50, 0};
  const NcclTable table = nccl_table(CollectiveUse::kAllReduce, t);
  CHECK(cell(table, kRing, kLl).latency_us == Approx(15.0));
  CHECK(cell(table, kRing, kLl128).latency_us == Approx(40.6));
  CHECK(cell(table, kRing, kSimple).latency_us == Approx(56.0));
  CHECK(cell(table, kTree, kLl).latency_us == Approx(15.2));
  CHECK(cell(table, NcclAlgorithm::kNvls, kSimple).latency_us == Approx(25.0));
  // Rings carry channels * rate * n / (2 (n - 1)); LL is limited to 141 GB/s on Hopper, LL128 to 0.92 of the ring.
  CHECK(cell(table, kRing, kSimple).bandwidth_gbs == Approx(360 * 8 / 14.0));
  CHECK(cell(table, kRing, kLl).bandwidth_gbs == Approx(141 * 8 / 14.0));
  CHECK(cell(table, kRing, kLl128).bandwidth_gbs == Approx(0.92 * 360 * 8 / 14.0));
  CHECK(cell(table, NcclAlgorithm::kNvls, kSimple).bandwidth_gbs == Approx(8 * 50 * 0.85 * 7 / 8 * 2 * 8 / 14.0));
}

TEST_CASE("on several nodes the limit of LL is the host's, not the device's") {
  NcclTopology t;
  t.ranks = 32;
  t.nodes = 4;
  t.ring = t.tree = {16, 22.5, 22.5};
  CHECK(cell(nccl_table(CollectiveUse::kAllGather, t), kRing, kLl).bandwidth_gbs == Approx(20.4 * 32 / 31));
  t.amd_cpu = true;
  CHECK(cell(nccl_table(CollectiveUse::kAllGather, t), kRing, kLl).bandwidth_gbs == Approx(19.0 * 32 / 31));
  // 31 steps, 3 of them between nodes; each of the others still posts to the network: 3 * 2 us on AMD hosts, Simple.
  CHECK(cell(nccl_table(CollectiveUse::kAllGather, t), kRing, kSimple).latency_us == Approx(8.4 + 28 * 6 + 3 * 14));
  t.amd_cpu = false;
  CHECK(cell(nccl_table(CollectiveUse::kAllGather, t), kRing, kSimple).latency_us == Approx(8.4 + 28 * 3.4 + 3 * 14));
}

TEST_CASE("the search finds the channels that NCCL's logs show") {
  const NcclGraph h100 = nccl_search(GpuGeneration::kHopper, false, 370.8, 370.8);
  CHECK(h100.channels == 12);
  CHECK(h100.intra == 30);
  const NcclGraph a100 = nccl_search(GpuGeneration::kAmpere, false, 240, 240);
  CHECK(a100.channels == 12);
  CHECK(a100.intra == 20);
  const NcclGraph b200 = nccl_search(GpuGeneration::kBlackwell, false, 721.8, 721.8);
  CHECK(b200.channels * b200.intra == 720);
  const NcclGraph slow = nccl_search(GpuGeneration::kHopper, true, 0.05, 0.05);
  CHECK(slow.channels * slow.intra == Approx(0.05));
}

TEST_CASE("corrections by size") {
  CHECK(nccl_tree_correction(kSimple, 63) == 1);
  CHECK(nccl_tree_correction(kLl, 64) == 1);
  CHECK(nccl_tree_correction(kLl, 64 << 12) == Approx(0.4));
  CHECK(nccl_tree_correction(kSimple, 1e12) == 1);
  CHECK(nccl_ring_plateau(GpuGeneration::kHopper) == 1.4);
  CHECK(nccl_table(CollectiveUse::kAllReduce, {.ranks = 1}).count == 0);
  CHECK(nccl_table(CollectiveUse::kAllToAll, {.ranks = 8}).count == 0);
  CHECK(bus_factor(CollectiveUse::kAllReduce, 4) == 1.5);
  CHECK(bus_factor(CollectiveUse::kAllGather, 4) == 0.75);
}
