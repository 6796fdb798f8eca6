// Workers that train apart, their folds replayed: the grid's layouts without sharding, each with a period of its own; and the
// volume that the literature says.
#include <string>

#include "plan/wire.h"
#include "tests/laws/equal.h"
#include "tests/laws/grid.h"
#include "tests/laws/refusals.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

constexpr Diloco kPeriods[] = {{.steps = 1}, {.steps = 2, .learning_rate = 0.7f, .momentum = 0.9f}, {.steps = 5}};

std::vector<Case> apart() {
  std::vector<Case> all;
  for (Case c : testing::legal_cases()) {
    if (c.layout.dp == 1 || c.layout.zero > 0 || c.layout.bucket_bytes > 0) continue;
    const size_t i = all.size();
    c.layout.diloco = kPeriods[i % std::size(kPeriods)];
    c.train.clip_norm = i % 2 == 0 ? 1 : 0;
    c.train.grad_norm = false;
    if (i / 3 % 3 == 1) c.train.precision = Precision::kBf16;
    if (i / 9 % 3 == 1) c.layout.offload.activations = OffloadTo::kCpu;
    if (i / 9 % 3 == 2 && c.layout.recompute == Recompute::kFull) c.layout.recompute_options.every = 2;
    if (!check(c).ok()) c.train.clip_norm = 0;  // three stages add no norms by halving
    c.name += " diloco " + std::to_string(c.layout.diloco.steps) + " " + std::string(name_of(c.train.precision));
    all.push_back(std::move(c));
  }
  return all;
}

TEST_CASE("apart: peak, classes and wire bytes of the plan equal their replay") {
  const std::vector<Case> cases = apart();
  CHECK(cases.size() > 200);
  for (const Case& c : cases) testing::require_equal(c);
}

TEST_CASE("apart: gradients never travel, and parameters once a period whatever its length") {
  Case c = apart().front();
  const auto sent = [](const Case& of, const std::string& comm) {
    const auto wire = total_wire_bytes(plan_of(of));
    return wire.contains(comm) ? wire.at(comm) : 0;
  };
  Case plain = c;
  plain.layout.diloco = {};
  const int64_t together = sent(plain, "dp.grads");
  for (const int steps : {1, 2, 8}) {
    c.layout.diloco.steps = steps;
    CHECK(sent(c, "dp.grads") == 0);
    CHECK(sent(c, "dp.parameters") == together);  // of `steps` steps: 1 / steps of the volume
    testing::require_equal(c, true);
  }
}

TEST_CASE("apart: refused where it has no meaning, with what to do instead") {
  Case c = apart().front();
  c.train.clip_norm = 0;
  Refusals r(c);
  r.c.layout.dp = 1;
  r.refused("one worker has nobody to average with");
  r.c.layout.zero = 1;
  r.refused("diloco.steps=1 with zero=1");
  r.c.layout.diloco.steps = -1;
  r.refused("no number of inner steps");
  r.c.layout.diloco.learning_rate = 0;
  r.refused("diloco.learning_rate=0");
  r.c.layout.diloco.momentum = 1;
  r.refused("diloco.momentum=1");
  r.c.layout.compression.kind = CompressionKind::kInt8;
  r.refused("with compression.kind=int8: no gradient travels");
  r.c.layout.offload.optimizer = OffloadTo::kCpu;
  r.refused("with offload.optimizer=cpu");
  r.c.layout.bucket_bytes = 4096;
  r.refused("averaged where they are");
  r.c.train.precision = Precision::kFp16;
  r.refused("workers do not talk");
  r.c.train.grad_norm = true;
  r.refused("a norm of its own");
  r.c.checkpoint.save_every = 2;
  r.refused("the moments belong to workers");
}

}  // namespace
}  // namespace shardlab::testing
