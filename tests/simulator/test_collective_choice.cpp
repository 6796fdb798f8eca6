// `collective_algorithm: auto` in plans of described machines: each collective has the algorithm that is predicted to take least.
#include <algorithm>
#include <bit>
#include <cmath>
#include <set>
#include <string>

#include "plan/op_fields.h"
#include "plan/row_levels.h"
#include "plan/text.h"
#include "plan/verify.h"
#include "simulator/interpreter/collective_choice.h"
#include "strategies/lower.h"
#include "sweeps/machines.h"
#include "tests/namespaces.h"
#include "tests/strategies/cases.h"
#include "tests/test.h"

namespace shardlab::testing::of_collective_choice {
namespace {

/// A case on nodes of eight devices, whose links to one another carry `inter` bytes/s.
Case on_nodes(int nodes, double inter) {
  Case c = tiny_case();
  const auto machine = parse_machine(*machine_text("hgx-h100-ndr"), "preset");
  REQUIRE(machine.ok());
  c.machine = *machine;
  c.machine.nodes = nodes;
  c.machine.inter_bytes_per_s = inter;
  c.layout.dp = 8 * nodes;
  return c;
}

/// A small model whose layers have `experts` experts, of which a token chooses two.
Model mixture_of(int64_t experts) {
  Model m;
  m.name = "mixture";
  m.family = Family::kLlama;
  m.layers = 2, m.hidden = 64, m.heads = 4, m.kv_heads = 2, m.head_dim = 16;
  m.ffn = 64, m.vocab = 64, m.max_positions = 64;
  m.experts = {.count = experts, .top_k = 2, .ffn = 32};
  return m;
}

Plan chosen_for(const Case& c) {
  const auto plan = with_chosen_collectives(c, lower(c), true);
  INFO((plan.ok() ? std::string() : plan.error().message));
  REQUIRE(plan.ok());
  return *plan;
}

std::set<Algorithm> algorithms_of(const Plan& plan, const std::string& label) {
  std::set<Algorithm> found;
  for (const Segment& segment : plan.segments)
    for (const Step& step : segment.steps)
      if (const Op* op = std::get_if<Op>(&step); op != nullptr && op->label == label)
        if (const auto* c = std::get_if<Collective>(&op->work)) found.insert(c->algorithm);
  return found;
}

}  // namespace

TEST_CASE("auto: no other algorithm of any collective is predicted to take less") {
  int collectives = 0;
  std::set<Algorithm> seen;
  for (const double inter : {50e9, 125e6})
    for (const int nodes : {1, 2, 3, 4})
      for (const int tp : {1, 4})
        for (const int zero : {0, 1, 3}) {
          Case c = on_nodes(nodes, inter);
          c.layout.tp = tp;
          c.layout.dp /= tp;
          c.layout.zero = zero;
          if (!check(c).ok()) continue;
          Plan plan = chosen_for(c);
          const auto costs = cost_model_for(c);
          REQUIRE(costs.ok());
          for (Segment& segment : plan.segments)
            for (Step& step : segment.steps) {
              Op* op = std::get_if<Op>(&step);
              if (op == nullptr || !std::holds_alternative<Collective>(op->work)) continue;
              auto& collective = std::get<Collective>(op->work);
              const std::vector<int> group = group_of(plan.mesh, plan.comms[collective.comm.index()], 0);
              if (group.size() < 2 || collective.kind == CollectiveKind::kAllToAll) continue;
              Instruction instruction;
              instruction.segment = &segment;
              instruction.op = op;
              const auto seconds = [&] { return (*costs)->communicate_among(plan, instruction, group, 1).value; };
              const Collective has = collective;
              const double least = seconds();
              seen.insert(has.algorithm);
              ++collectives;
              for (const Algorithm other : {Algorithm::kRing, Algorithm::kDirect, Algorithm::kTree, Algorithm::kHalvingDoubling}) {
                if (other == Algorithm::kHalvingDoubling && !std::has_single_bit(group.size())) continue;
                collective.algorithm = other;
                INFO(op->label << " among " << group.size() << " on " << nodes << " nodes");
                CHECK(least <= seconds());
              }
              collective = has;
            }
        }
  CHECK(collectives > 100);
  CHECK(seen.size() >= 3);
}

TEST_CASE("auto: two levels between slowly linked nodes, and what is asked for stays") {
  Case c = on_nodes(2, 125e6);
  const Plan plan = chosen_for(c);
  // Of the few bytes of some units the steps count: halving-doubling has 6 within nodes and 2 across; a direct exchange, with 2 across, has
  // 14 more peers in each.
  CHECK(algorithms_of(plan, "gradients") == std::set{Algorithm::kHalvingDoubling, Algorithm::kHierarchical});
  CHECK(verify(plan).ok());
  CHECK(print(plan).find("algorithm=hierarchical") != std::string::npos);
  c.layout.collective_algorithm = AlgorithmChoice::kRing;
  CHECK(algorithms_of(chosen_for(c), "gradients") == std::set{Algorithm::kRing});
  c.layout.collective_algorithm = AlgorithmChoice::kAuto;
  c.canonical = true;
  CHECK(algorithms_of(chosen_for(c), "gradients") == std::set{Algorithm::kDirect});
}

TEST_CASE("auto: rows of experts go by node where that is predicted to take less, and the plan has room for what is staged") {
  Case c = on_nodes(2, 5e9);
  c.model = mixture_of(16);
  c.layout.ep = 16;
  c.train.micro_batch = 1;
  const auto by_node = [](const Plan& plan) {
    int64_t staged = 0;
    for (const Segment& segment : plan.segments)
      for (const Step& step : segment.steps)
        if (const Op* op = std::get_if<Op>(&step)) staged = std::max(staged, row_stage_bytes(segment, *op));
    return staged;
  };
  const Plan plan = chosen_for(c);
  CHECK(algorithms_of(plan, "moe.go") == std::set{Algorithm::kHierarchical});
  REQUIRE(by_node(plan) > 0);
  int64_t workspace = 0;
  for (const Buffer& b : plan.roles[0].buffers)
    if (b.kind == BufferClass::kWorkspace) workspace = std::max(workspace, b.type.bytes());
  CHECK(workspace >= by_node(plan));
  c.layout.collective_algorithm = AlgorithmChoice::kHierarchical;
  CHECK(by_node(chosen_for(c)) == by_node(plan));
  c.layout.collective_algorithm = AlgorithmChoice::kRing;
  CHECK(by_node(chosen_for(c)) == 0);
  // On one node there are no levels.
  Case one = on_nodes(1, 5e9);
  one.model = c.model, one.layout.ep = 8, one.train.micro_batch = 1;
  CHECK(algorithms_of(chosen_for(one), "moe.go") == std::set{Algorithm::kRing});
}

namespace {

/// Rates and latencies that a hand can count with: within a node 100 GB/s and 1 us a step, between nodes 10 GB/s a device and 10 us.
Efficiency round_efficiency() {
  Efficiency e;
  e.link = e.network = 1;
  e.step_latency_s = 1e-6, e.network_latency_s = 10e-6;
  return e;
}
constexpr double kLink = 100e9, kInter = 10e9, kStep = 1e-6, kHop = 10e-6;

/// Seconds of an all-reduce of n bytes among N nodes of L ranks, powers of two, counted by hand; of other collectives half of the steps and
/// bytes, but for a tree's way down or up, which a part of the buffer goes.
double by_hand(Algorithm algorithm, double n, int nodes, int per_node) {
  const double N = nodes, L = per_node, g = N * L;
  switch (algorithm) {
    // 2 (g - 1) steps of n/g bytes; over nodes each of the L ranks of a node has a ring of its own with 1/L of the bytes.
    case Algorithm::kRing:
      return 2 * (g - 1) * (nodes > 1 ? kHop : kStep) + 2 * n * (g - 1) / g / (nodes > 1 ? std::min(kLink, L * kInter) : kLink);
    // The whole buffer up and down: log2 L steps of less than a node's distance, log2 N steps of more.
    case Algorithm::kTree: return 2 * (std::log2(L) * (kStep + n / kLink) + std::log2(N) * (kHop + n / kInter));
    // A step of distance d has n d/g bytes: those with d < L have n (L - 1)/g in all, and those from L to g/2 n (g - L)/g.
    case Algorithm::kHalvingDoubling:
      return 2 * (std::log2(L) * kStep + n * (L - 1) / g / kLink + std::log2(N) * kHop + n * (g - L) / g / kInter);
    // A ring within the node, and one across of a part in L.
    case Algorithm::kHierarchical:
      return 2 * ((L - 1) * kStep + n * (L - 1) / L / kLink + (N - 1) * kHop + n / L * (N - 1) / N / kInter);
    // Twice one part to each other rank, and half a microsecond for each peer beyond the first.
    case Algorithm::kDirect:
      return 2 * ((nodes > 1 ? kHop : kStep) + n * (L - 1) / g / kLink + n * (g - L) / g / kInter + (g - 2) * 0.5e-6);
  }
  return 0;
}

}  // namespace

TEST_CASE("auto: each algorithm takes what a hand counts hop by hop, and the least is chosen") {
  std::set<Algorithm> chosen;
  int counted = 0;
  for (const int nodes : {1, 2, 4, 8})
    for (const int per_node : {1, 2, 4, 8})
      for (const int hidden : {32, 512}) {
        if (nodes * per_node < 2) continue;
        Case c = on_nodes(nodes, kInter);
        c.machine.devices_per_node = per_node;
        c.machine.device.link_bytes_per_s = kLink;
        c.layout.dp = nodes * per_node;
        c.model.hidden = hidden, c.model.ffn = 4 * hidden;
        c.model.head_dim = hidden / c.model.heads;
        REQUIRE(check(c).ok());
        const DatasheetCostModel costs(c.machine, c.train.precision, round_efficiency());
        Plan plan = *lower(c);
        choose_collectives(c, plan, costs);
        for (Segment& segment : plan.segments)
          for (Step& step : segment.steps) {
            Op* op = std::get_if<Op>(&step);
            auto* collective = op != nullptr ? std::get_if<Collective>(&op->work) : nullptr;
            if (collective == nullptr || collective->kind != CollectiveKind::kAllReduce) continue;
            const std::vector<int> group = group_of(plan.mesh, plan.comms[collective->comm.index()], 0);
            const int64_t bytes = cost_shape_of(plan, segment, *op)[0];
            if (bytes % (4 * static_cast<int64_t>(group.size())) != 0) continue;  // parts would not be alike
            Instruction instruction;
            instruction.segment = &segment;
            instruction.op = op;
            const Algorithm has = collective->algorithm;
            double least = HUGE_VAL;
            Algorithm best = has;
            for (const Algorithm a :
                 {Algorithm::kRing, Algorithm::kDirect, Algorithm::kTree, Algorithm::kHalvingDoubling, Algorithm::kHierarchical}) {
              if (a == Algorithm::kHierarchical && (nodes == 1 || per_node == 1)) continue;
              if (a == Algorithm::kHalvingDoubling && group.size() == 2) continue;
              collective->algorithm = a;
              collective->per_node = a == Algorithm::kHierarchical ? per_node : 1;
              const double hand = by_hand(a, static_cast<double>(bytes), nodes, per_node);
              INFO(kAlgorithms[static_cast<size_t>(a)] << " of " << bytes << " bytes on " << nodes << " nodes of " << per_node);
              CHECK(costs.communicate_among(plan, instruction, group, 1).value == Approx(hand).epsilon(1e-9));
              if (hand < least * (1 - 1e-12)) least = hand, best = a;
              ++counted;
            }
            INFO(bytes << " bytes on " << nodes << " nodes of " << per_node);
            CHECK(by_hand(has, static_cast<double>(bytes), nodes, per_node) == Approx(least).epsilon(1e-9));
            chosen.insert(best);
          }
      }
  CHECK(counted > 200);
  CHECK(chosen.size() >= 3);
}

TEST_CASE("the collectives of a plan are told once each, with what every algorithm of the group takes") {
  Case c = on_nodes(2, 125e6);
  c.layout.tp = 2, c.layout.dp = 8;
  const Plan plan = chosen_for(c);
  const std::vector<PricedCollective> rows = priced_collectives(c, plan);
  REQUIRE(rows.size() >= 3);
  std::set<std::string> kinds;
  double before = HUGE_VAL;
  for (const PricedCollective& row : rows) {
    INFO(row.op << ", " << row.comm);
    kinds.insert(row.comm);
    CHECK(row.runs > 0);
    CHECK(row.bytes > 0);
    REQUIRE(row.prices.size() >= 3);
    CHECK(row.prices.front().algorithm == row.algorithm);  // `auto` took the least
    CHECK(std::ranges::is_sorted(row.prices, {}, &PricedCollective::Price::seconds));
    const double seconds = row.prices.front().seconds * static_cast<double>(row.runs);
    CHECK(seconds <= before);
    before = seconds;
    CHECK(row.ranks == (row.comm == "tp" ? 2 : 8));
    CHECK(row.nodes == (row.comm == "tp" ? 1 : 2));
  }
  CHECK(kinds.size() >= 2);
  c.layout.collective_algorithm = AlgorithmChoice::kRing;
  for (const PricedCollective& row : priced_collectives(c, chosen_for(c))) CHECK(row.algorithm == Algorithm::kRing);
  c.machine.local = true, c.layout.collective_algorithm = AlgorithmChoice::kAuto;
  for (const PricedCollective& row : priced_collectives(c, *lower(c))) CHECK(row.prices.empty());
}

TEST_CASE("exchanges of experts are priced from rank to rank and by node, and stand where their time puts them") {
  Case c = on_nodes(2, 125e6);
  c.model.family = Family::kLlama, c.model.kv_heads = c.model.heads, c.model.max_positions = 0;
  c.model.experts = {.count = 16, .top_k = 4, .ffn = 4 * c.model.hidden};
  c.layout.dp = 16, c.layout.ep = 16;
  const auto legal = check(c);
  INFO((legal.ok() ? std::string() : legal.error().message));
  REQUIRE(legal.ok());
  const Plan plan = chosen_for(c);
  const auto costs = cost_model_for(c);
  REQUIRE(costs.ok());
  const std::vector<PricedCollective> rows = priced_collectives(c, plan);
  double before = HUGE_VAL;
  int exchanges = 0;
  for (const PricedCollective& row : rows) {
    INFO(row.op << ", " << row.comm);
    const auto own = std::ranges::find(row.prices, row.algorithm, &PricedCollective::Price::algorithm);
    REQUIRE(own != row.prices.end());
    CHECK(own->seconds > 0);
    CHECK(own->seconds * static_cast<double>(row.runs) <= before);
    before = own->seconds * static_cast<double>(row.runs);
    if (!row.kind.starts_with("all_to_all")) continue;
    ++exchanges;
    // Counts have one algorithm; rows go from rank to rank or by node, and by the one that takes less.
    const bool counts = row.op.find("moe.counts") != std::string::npos;
    CHECK(row.prices.size() == (counts ? 1 : 2));
    CHECK(row.prices.front().algorithm == row.algorithm);
  }
  CHECK(exchanges >= 4);
  // Rows of experts across a slow network take longest.
  CHECK(rows.front().kind.starts_with("all_to_all"));
  // The price is the cost model's of that very exchange.
  for (const Segment& segment : plan.segments)
    for (const Step& step : segment.steps)
      if (const Op* op = std::get_if<Op>(&step); op != nullptr && segment.name + " " + op->label == rows.front().op) {
        Instruction instruction;
        instruction.segment = &segment;
        instruction.op = op;
        const auto& exchange = std::get<Collective>(op->work);
        CHECK((*costs)->communicate_among(plan, instruction, group_of(plan.mesh, plan.comms[exchange.comm.index()], 0), 1).value ==
              rows.front().prices.front().seconds);
      }
}

TEST_CASE("auto: plans of this machine keep the rule, so that no bit hangs on a measurement") {
  Case c = tiny_case();
  c.layout.dp = 4;
  c.machine.local = true;
  CHECK(print(chosen_for(c)) == print(*lower(c)));
}

}  // namespace shardlab::testing::of_collective_choice
