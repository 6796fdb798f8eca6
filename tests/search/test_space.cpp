// The space holds every legal point once, and nothing that was not asked for.
#include <set>
#include <tuple>

#include "simulator/estimator/search/space.h"
#include "tests/analytic/studies.h"
#include "tests/test.h"

namespace shardlab::simulator::search {
namespace {

using analytic::Recompute;
using analytic::testing::gpt_175b;
using analytic::testing::mixtral_8x7b;

std::vector<Point> all_points(const Space& space, const analytic::ModelShape& shape, int32_t per_node) {
  std::vector<Point> points;
  const auto add = [&](const Point& cut) {
    for (const State& state : states_of(space, cut, per_node))
      for (const Order& order : orders_of(space, shape.layers, cut.pp)) points.push_back(with(with(cut, state), order));
  };
  for (const int32_t d : space.devices) for_each_cut(space, shape, d, add, [](const Point&) {});
  return points;
}

auto key(const Point& p) {
  return std::tuple(p.dp, p.tp, p.pp, p.vpp, p.cp, p.ep, p.zero, p.hybrid_shard, p.schedule, p.sequence_parallel, p.cp_kind,
                    p.recompute.modules, p.offload_activations, p.offload_optimizer, p.offload_parameters, p.micro_batch);
}

TEST_CASE("divisors, ascending") {
  CHECK(divisors(1) == std::vector<int32_t>{1});
  CHECK(divisors(12) == std::vector<int32_t>{1, 2, 3, 4, 6, 12});
  CHECK(divisors(49) == std::vector<int32_t>{1, 7, 49});
  CHECK(divisors(97) == std::vector<int32_t>{1, 97});
}

TEST_CASE("each point once, on all devices, with the whole batch") {
  const Space space{.devices = {16}, .seq_len = 2048, .sequences = 24};
  const std::vector<Point> points = all_points(space, mixtral_8x7b(), 8);
  std::set<decltype(key(points[0]))> seen;
  for (const Point& p : points) {
    REQUIRE(seen.insert(key(p)).second);
    REQUIRE(p.world_size() == 16);
    REQUIRE(p.tokens_per_step() == 24 * 2048);
    REQUIRE((p.offload_parameters == Medium::kDevice || p.zero == 3));
    REQUIRE((p.pp == 1) == (p.schedule == Schedule::kNone));
    REQUIRE((p.cp > 1 || p.cp_kind == CpKind::kZigzag));
    REQUIRE((p.tp > 1 || !p.sequence_parallel));
  }
  CHECK(points.size() > 10'000);
}

TEST_CASE("among one rank ZeRO shards nothing, and a layout is there once; under zero 3 parameters are offloaded") {
  const Space space{.devices = {8}, .seq_len = 64, .sequences = 8};
  bool offloaded = false;
  for (const Point& p : all_points(space, gpt_175b(), 8)) {
    if (p.dp * p.cp > 1) continue;
    REQUIRE((p.zero == 0 || (p.zero == 3 && p.offload_parameters != Medium::kDevice)));
    offloaded = offloaded || p.zero == 3;
  }
  CHECK(offloaded);
  // Who asks for a stage gets it.
  const Space asked{.devices = {8}, .seq_len = 64, .sequences = 8, .tp = {8}, .zero = {1}};
  CHECK_FALSE(all_points(asked, gpt_175b(), 8).empty());
}

TEST_CASE("every legal layout of ranks, batch and experts is in the space") {
  // Counted by trying all numbers instead of dividing.
  const Space space{.devices = {12}, .seq_len = 64, .sequences = 12, .zero = {0}, .recompute = {{0}}, .offload = {{}}};
  std::set<std::tuple<int, int, int, int, int, int>> expected, found;
  for (int tp = 1; tp <= 12; ++tp)
    for (int pp = 1; pp <= 12; ++pp)
      for (int cp = 1; cp <= 12; ++cp)
        for (int dp = 1; dp <= 12; ++dp)
          for (int micro = 1; micro <= 12; ++micro)
            for (int ep = 1; ep <= 8; ++ep)
              if (tp * pp * cp * dp == 12 && 12 % (dp * micro) == 0 && 8 % ep == 0 && (dp * cp * tp) % ep == 0)
                expected.insert({tp, pp, cp, dp, micro, ep});
  for (const Point& p : all_points(space, mixtral_8x7b(), 8)) found.insert({p.tp, p.pp, p.cp, p.dp, p.micro_batch, p.ep});
  CHECK(found == expected);
}

TEST_CASE("virtual stages are equal, two or more to a rank") {
  const Space space{.devices = {16}, .seq_len = 2048, .sequences = 16};
  std::set<int> loops;
  for (const Order& o : orders_of(space, 96, 16)) {
    if (o.schedule != Schedule::kInterleaved) continue;
    CHECK(96 % (16 * o.vpp) == 0);
    loops.insert(o.vpp);
  }
  CHECK(loops == std::set<int>{2, 3, 6});
  CHECK(orders_of(space, 96, 1).size() == 1);
}

TEST_CASE("of given schedules each number of stages takes its own") {
  Space space{.devices = {16}, .seq_len = 2048, .sequences = 16, .schedule = {Schedule::kNone, Schedule::k1F1B, Schedule::kAfab}};
  REQUIRE(orders_of(space, 96, 1).size() == 1);
  CHECK(orders_of(space, 96, 1)[0].schedule == Schedule::kNone);
  CHECK(orders_of(space, 96, 4).size() == 2);
  space.schedule = {Schedule::k1F1B};
  REQUIRE(orders_of(space, 96, 1).size() == 1);
  CHECK(orders_of(space, 96, 1)[0].schedule == Schedule::k1F1B);  // to be refused
}

TEST_CASE("what is given is all there is") {
  Space space{.devices = {8}, .seq_len = 1024, .sequences = 8};
  space.tp = {2, 4}, space.zero = {1}, space.schedule = {Schedule::k1F1B}, space.recompute = {{Recompute::kLayer}};
  space.offload = {{}}, space.micro_batch = {2}, space.sequence_parallel = {1};
  for (const Point& p : all_points(space, gpt_175b(), 8)) {
    CHECK((p.tp == 2 || p.tp == 4));
    CHECK(p.zero == 1);
    CHECK(p.schedule == Schedule::k1F1B);
    CHECK(p.recompute.full());
    CHECK(p.micro_batch == 2);
    CHECK(p.sequence_parallel);
  }
}

TEST_CASE("a batch that cannot be cut is reported with its layout") {
  const Space space{.devices = {8}, .seq_len = 1024, .sequences = 4};
  int undivided = 0;
  for_each_cut(
      space, gpt_175b(), 8, [](const Point& p) { REQUIRE(p.dp <= 4); },
      [&](const Point& p) {
        ++undivided;
        REQUIRE(p.dp == 8);
      });
  CHECK(undivided == 1);
}

TEST_CASE("impossible spaces are refused") {
  const Space good{.devices = {8}, .seq_len = 1024, .sequences = 8};
  const auto refused = [&](auto change) {
    Space space = good;
    change(space);
    return !check(space).ok();
  };
  CHECK(check(good).ok());
  CHECK(refused([](Space& s) { s.devices = {}; }));
  CHECK(refused([](Space& s) { s.devices = {0}; }));
  CHECK(refused([](Space& s) { s.seq_len = 0; }));
  CHECK(refused([](Space& s) { s.sequences = 0; }));
  CHECK(refused([](Space& s) { s.tp = {-1}; }));
  CHECK(refused([](Space& s) { s.micro_batch = {1 << 30}; }));
  CHECK(refused([](Space& s) { s.zero = {4}; }));
  CHECK(refused([](Space& s) { s.hybrid_shard = {-2}; }));
}

}  // namespace
}  // namespace shardlab::simulator::search
