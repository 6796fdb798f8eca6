// Lower bounds bound: over random legal points of every framework, nothing is faster or smaller than what a bound says.
#include <random>

#include "simulator/estimator/search/space.h"
#include "tests/analytic/studies.h"
#include "tests/deal.h"
#include "tests/test.h"

namespace shardlab::simulator::search {
namespace {

using analytic::Estimator;
using analytic::testing::gpt_175b;
using analytic::testing::llama_8b;
using analytic::testing::mixtral_8x7b;
using analytic::testing::study;

/// Every choice of a few random cuts of 64 devices is checked against the bounds of its cut and state.
void check_bounds(const analytic::ModelShape& shape, std::string_view profile, unsigned seed, int64_t& points) {
  const analytic::Prepared prepared = study(shape, profile, 8);
  Space space{.devices = {64}, .seq_len = 4096, .sequences = 64};
  std::mt19937 random(seed);
  space.precision = seed % 2 == 0 ? Precision::kBf16 : Precision::kFp32;
  space.bucket_bytes = {1 << 20, 400 << 20};
  space.collective_algorithm = {AlgorithmChoice::kAuto, AlgorithmChoice::kRing};
  if (profile == "shardlab") space.collective_algorithm.push_back(AlgorithmChoice::kHalvingDoubling);
  std::vector<Point> cuts;
  for_each_cut(
      space, shape, 64, [&](const Point& p) { cuts.push_back(p); }, [](const Point&) {});
  std::shuffle(cuts.begin(), cuts.end(), random);
  Estimator estimator(prepared);
  for (size_t i = 0; i < std::min<size_t>(cuts.size(), shardlab::testing::dealt(60, 20)); ++i) {
    if (refusal_of(prepared, cuts[i]) != analytic::Refusal::kNone) continue;
    const double least_s = estimator.least_step_s(cuts[i]);
    for (const State& state : states_of(space, cuts[i], 8)) {
      const Point stated = with(cuts[i], state);
      if (refusal_of(prepared, stated) != analytic::Refusal::kNone) continue;
      const double least_bytes = estimator.least_device_bytes(stated);
      for (const Order& order : orders_of(space, shape.layers, stated.pp)) {
        Point p = with(stated, order);
        for (const int overlap : {-1, 0, 1}) {
          p.overlap = static_cast<int8_t>(overlap), p.reshard = static_cast<int8_t>(-overlap);
          const analytic::Estimate e = estimator(p);
          if (!e.legal()) continue;
          ++points;
          REQUIRE(least_s > 0);
          REQUIRE(least_s <= e.step_s);
          REQUIRE(least_bytes <= static_cast<double>(e.memory.device()));
        }
      }
    }
  }
}

TEST_CASE("no point is faster or smaller than its cut's bounds") {
  int64_t points = 0;
  for (const std::string_view name : analytic::profile_names())
    for (const analytic::ModelShape& shape : {gpt_175b(), llama_8b(), mixtral_8x7b()})
      for (const unsigned seed : {1U, 2U}) check_bounds(shape, name, seed, points);
  CHECK(points > (shardlab::testing::thorough() ? 100'000 : 30'000));
}

TEST_CASE("bounds are near what they bound where nothing but the layers' work takes time") {
  // One device, one micro-batch of a long sequence: the update and the launches are all that the bound leaves out.
  const analytic::Prepared prepared = study(llama_8b(), "megatron", 1);
  Estimator estimator(prepared);
  const Point p{.micro_batch = 1, .grad_accumulation = 64, .seq_len = 8192};
  CHECK(estimator.least_step_s(p) > 0.99 * estimator(p).step_s);
  CHECK(estimator.least_device_bytes(p) > 0.8 * static_cast<double>(estimator(p).memory.live()));
}

}  // namespace
}  // namespace shardlab::simulator::search
