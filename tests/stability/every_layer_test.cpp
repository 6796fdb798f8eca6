// Every k-th layer made again: the same bits as keeping everything, wherever the stages begin.
#include "tests/namespaces.h"
#include "tests/stability/training.h"
#include "tests/test.h"

namespace shardlab::testing {

TEST_CASE("every k-th layer made again changes no bit", "[recompute]") {
  for (const Ranks& ranks : {Ranks{}, Ranks{.dp = 2, .zero = 3}, Ranks{.tp = 2}, Ranks{.pp = 2, .accumulation = 2}}) {
    Case keep = stability_case(ranks);
    keep.model.layers = 3;
    keep.train.dropout = 0.1f;
    keep.train.learning_rate = {
        .kind = LearningRate::Kind::kWsd, .peak = 0.01f, .warmup_steps = 1, .total_steps = 3, .decay_steps = 1};
    Training kept(keep);
    for (int64_t i = 0; i < 3; ++i) kept.step(i);
    const auto state = kept.state();
    for (const int every : {2, 3}) {
      CAPTURE(line_of(ranks), every);
      Case again = keep;
      again.layout.recompute = Recompute::kFull;
      again.layout.recompute_options.every = every;
      Training made(again);
      for (int64_t i = 0; i < 3; ++i) made.step(i);
      CHECK(made.state() == state);
    }
  }
}

}  // namespace shardlab::testing
