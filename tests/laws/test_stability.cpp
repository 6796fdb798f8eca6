// Guards, loss scales and layers of which every k-th is made again, with their folds replayed: part of the grid's layouts, dealt over
// them.
#include <map>
#include <string>

#include "plan/memory.h"
#include "plan/wire.h"
#include "strategies/lower.h"
#include "tests/deal.h"
#include "tests/laws/equal.h"
#include "tests/laws/grid.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

void require_verified_and_equal(const Case& c) { testing::require_equal(c, true); }

/// Halving-doubling may not serve the number of stages over which flags and norms travel.
void make_legal(Case& c) {
  if (!check(c).ok()) c.layout.collective_algorithm = AlgorithmChoice::kRing;
}

}  // namespace

TEST_CASE("guards and loss scales: peak, classes and wire bytes of the plan equal its replay") {
  const std::vector<Case>& grid = testing::legal_cases();
  for (size_t i = 0; i < grid.size(); i += 11) {
    Case c = grid[i];
    const size_t kind = i / 11 % 6;
    Guard& g = c.train.guard;
    if (kind != 3 && kind != 5) g.nonfinite = GuardAction::kSkip;
    if (kind > 0) g.spike = GuardAction::kStop;
    if (kind == 1 || kind == 5) g.norm_factor = 0;
    if (kind == 2) g.loss_factor = 0;
    if (kind >= 4) c.train.clip_norm = 1;
    if (kind == 5) c.train.precision = Precision::kFp16;
    c.name += " guard " + std::to_string(kind);
    make_legal(c);
    require_verified_and_equal(c);
  }
}

TEST_CASE("averages of the weights: as much as a moment, cut alike, and nothing on the wire") {
  const std::vector<Case>& grid = testing::legal_cases();
  int64_t compared = 0;
  for (size_t i = 0; i < grid.size(); i += dealt(13, 41)) {
    Case c = grid[i];
    const Plan without = plan_of(c);
    c.train.ema_decay = 0.999f;
    c.name += " averaged";
    if (!check(c).ok()) continue;
    require_verified_and_equal(c);
    const Plan with = plan_of(c);
    CHECK(total_wire_bytes(with) == total_wire_bytes(without));
    if (c.train.optimizer != Optimizer::kAdamW) continue;
    INFO(c.name);
    for (int role = 0; role < static_cast<int>(with.roles.size()); ++role)
      CHECK(2 * standing_bytes(with, role, BufferClass::kMoment) == 3 * standing_bytes(without, role, BufferClass::kMoment));
    ++compared;
  }
  CHECK(compared > (thorough() ? 200 : 66));
}

TEST_CASE("every k-th layer made again: peak, classes and wire bytes of the plan equal its replay") {
  const std::vector<Case>& grid = testing::legal_cases();
  int64_t compared = 0;
  for (size_t i = 0; i < grid.size(); ++i) {
    if (grid[i].layout.recompute != Recompute::kFull || i % dealt(5, 25) != 0) continue;
    Case c = grid[i];
    c.layout.recompute_options.every = 2 + static_cast<int>(i / 5 % 3);
    c.model.layers += static_cast<int64_t>(i / 15 % 4);
    c.name += " L" + std::to_string(c.model.layers) + " every " + std::to_string(c.layout.recompute_options.every);
    make_legal(c);
    require_verified_and_equal(c);
    ++compared;
  }
  CHECK(compared > (thorough() ? 500 : 160));
}

TEST_CASE("every k-th layer made again: activations of the others stay, and k = 1 is full recompute") {
  Case c = testing::legal_cases().front();
  c.model.layers = 6;
  const auto peak = [&](Recompute recompute, int every) {
    c.layout.recompute = recompute;
    c.layout.recompute_options.every = every;
    return peak_of_case(c);
  };
  const int64_t none = peak(Recompute::kNone, 1), full = peak(Recompute::kFull, 1);
  int64_t last = full;
  for (const int every : {2, 3, 6}) {
    const int64_t here = peak(Recompute::kFull, every);
    CHECK(here > last);
    CHECK(here < none);
    last = here;
  }
  c.layout.recompute_options.every = 0;
  CHECK_FALSE(check(c).ok());
  c.layout.recompute_options.every = 2;
  c.layout.recompute = Recompute::kSelective;
  REQUIRE_FALSE(check(c).ok());
  CHECK(check(c).error().message == "recompute_options.every=2 with recompute=selective");
}

}  // namespace shardlab::testing
