// `collective_algorithm: auto` in plans of described machines: each collective has the algorithm that is predicted to take least.
#include <algorithm>
#include <bit>
#include <cmath>
#include <set>
#include <string>

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
  // Of the few bytes of some units the steps count, and a direct exchange has fewest.
  CHECK(algorithms_of(plan, "gradients") == std::set{Algorithm::kDirect, Algorithm::kHierarchical});
  CHECK(verify(plan).ok());
  CHECK(print(plan).find("algorithm=hierarchical") != std::string::npos);
  c.layout.collective_algorithm = AlgorithmChoice::kRing;
  CHECK(algorithms_of(chosen_for(c), "gradients") == std::set{Algorithm::kRing});
  c.layout.collective_algorithm = AlgorithmChoice::kAuto;
  c.canonical = true;
  CHECK(algorithms_of(chosen_for(c), "gradients") == std::set{Algorithm::kDirect});
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

TEST_CASE("auto: plans of this machine keep the rule, so that no bit hangs on a measurement") {
  Case c = tiny_case();
  c.layout.dp = 4;
  c.machine.local = true;
  CHECK(print(chosen_for(c)) == print(*lower(c)));
}

}  // namespace shardlab::testing::of_collective_choice
