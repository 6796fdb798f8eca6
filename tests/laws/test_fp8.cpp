// Products of 8-bit factors with their folds replayed: the grid's layouts dealt over scalings and kinds of recompute; what is kept,
// and what is agreed on.
#include <map>
#include <string>

#include "plan/memory.h"
#include "plan/wire.h"
#include "strategies/lower.h"
#include "tests/laws/equal.h"
#include "tests/laws/grid.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

using testing::plan_of;

constexpr Fp8Scaling kScalings[] = {Fp8Scaling::kCurrent, Fp8Scaling::kDelayed, Fp8Scaling::kBlock};
constexpr const char* kModules[] = {"", "attn.norm", "attn.core mlp.act", "attn.norm attn.core mlp.norm mlp.act"};

/// Every 31st case of the grid (which is coprime to the lengths of its lists).
std::vector<Case> fp8_cases() {
  std::vector<Case> all;
  const std::vector<Case>& grid = testing::legal_cases();
  for (size_t i = 0; i < grid.size(); i += 31) {
    const size_t n = i / 31;
    Case c = grid[i];
    c.train.precision = Precision::kFp8;
    c.train.fp8_scaling = kScalings[n % 3];
    if (n % 4 == 1) c.train.accumulate_dtype = "bf16";
    if (c.layout.recompute == Recompute::kNone && n % 2 == 0) {
      c.layout.recompute = Recompute::kSelective;
      c.layout.recompute_options.modules = kModules[n / 2 % std::size(kModules)];
    }
    if (c.layout.recompute == Recompute::kFull && n % 5 == 0) c.layout.recompute_options.every = 2;
    if (c.train.fp8_scaling == Fp8Scaling::kBlock && c.layout.tp > 1) {  // slices of whole blocks
      const int64_t t = c.layout.tp;
      c.model.heads = c.model.kv_heads = 4;
      c.model.head_dim = 32 * t;
      c.model.ffn = 128 * t;
    }
    c.name += " " + std::string(name_of(c.train.fp8_scaling)) + " " + c.train.accumulate_dtype + " " +
              std::string(name_of(c.layout.recompute)) + " " + c.layout.recompute_options.modules;
    all.push_back(std::move(c));
  }
  return all;
}

/// Sixteen heads of 8, so that nothing is rounded up.
Case plain(Fp8Scaling scaling) {
  Case c;
  c.name = name_of(scaling);
  Model& m = c.model;
  m.family = Family::kLlama;
  m.layers = 3;
  m.hidden = 128;
  m.heads = m.kv_heads = 16;
  m.head_dim = 8;
  m.ffn = 384;
  m.vocab = 128;
  c.train.seq_len = 64;
  c.train.precision = Precision::kFp8;
  c.train.fp8_scaling = scaling;
  return c;
}

int64_t kept(const Case& c) { return kept_bytes_of_layer(plan_of(c)); }

std::string refusal(const Case& c) {
  const Result<void> checked = check(c);
  return checked.ok() ? std::string() : to_string(checked.error());
}

TEST_CASE("8-bit factors: peak, classes and wire bytes of the plan equal its replay") {
  const std::vector<Case> cases = fp8_cases();
  CHECK(cases.size() > 100);
  for (const Case& c : cases) testing::require_equal(c);
}

TEST_CASE("inputs of products are kept in 8 bits, attention's output in both") {
  for (const Fp8Scaling scaling : kScalings) {
    Case c = plain(scaling), wide = c;
    wide.train.precision = Precision::kBf16;
    wide.train.fp8_scaling = Train{}.fp8_scaling;
    const int64_t tokens = c.train.seq_len, h = c.model.hidden, f = c.model.ffn;
    const int64_t inputs = 2 * h + f, with_output = inputs + c.model.heads * c.model.head_dim;
    // One scale of 64 bytes a factor; or a number each 128 elements of an input.
    const int64_t scales = c.train.fp8_scaling == Fp8Scaling::kCurrent ? 8 * 64
                           : c.train.fp8_scaling == Fp8Scaling::kBlock ? 4 * tokens * with_output / 128
                                                                       : 0;
    CHECK(kept(wide) - kept(c) == 2 * tokens * inputs - tokens * with_output - scales);
  }
}

TEST_CASE("who agrees: tp on every current scale, dp and tp once a step on delayed ones, nobody on blocks") {
  for (const Fp8Scaling scaling : kScalings) {
    Case c = plain(scaling);
    c.model.heads = c.model.kv_heads = 4;
    c.model.head_dim = 64;
    c.model.ffn = 256;
    c.layout.dp = 2;
    c.train.grad_accumulation = 3;
    for (const int tp : {1, 2}) {
      c.layout.tp = tp;
      Case wide = c;
      wide.train.precision = Precision::kBf16;
      wide.train.fp8_scaling = Train{}.fp8_scaling;
      auto wire = total_wire_bytes(plan_of(c)), without = total_wire_bytes(plan_of(wide));
      const bool current = c.train.fp8_scaling == Fp8Scaling::kCurrent, delayed = c.train.fp8_scaling == Fp8Scaling::kDelayed;
      const int64_t among_tp = tp == 1 ? 0 : wire.at("tp") - without.at("tp");
      // 2 (t - 1) numbers of 4 bytes for each of 8 tensors, over 3 layers, 3 micro-batches, 2 replicas.
      CHECK(among_tp == (current && tp == 2 ? 2 * 4 * 8 * 3 * 3 * 2 : 0));
      CHECK(wire.contains("amax") == delayed);
      if (delayed) CHECK(wire.at("amax") == 2 * (2 * tp - 1) * 4 * 12 * 3);
    }
  }
}

TEST_CASE("full recompute asks no rank again: the scale of the first time is kept") {
  Case c = plain(Fp8Scaling::kCurrent);
  c.layout.tp = 2;
  Case again = c;
  again.layout.recompute = Recompute::kFull;
  const auto maxima = [](const Plan& plan) {
    int64_t n = 0;
    for (const Segment& segment : plan.segments)
      for (const Step& step : segment.steps)
        if (const Op* op = std::get_if<Op>(&step))
          if (const auto* k = std::get_if<Kernel>(&op->work)) n += k->name == "amax";
    return n;
  };
  CHECK(maxima(plan_of(again)) == maxima(plan_of(c)));
}

TEST_CASE("what fp8 cannot be is refused: slices that cut blocks, wider gradients than results, settings without it") {
  Case c = plain(Fp8Scaling::kBlock);
  CHECK(refusal(c).empty());
  c.layout.tp = 2;
  CHECK(refusal(c).find("fp8_scaling=block with tp=2: a rank's 192") != std::string::npos);
  c.train.fp8_scaling = Fp8Scaling::kCurrent;
  CHECK(refusal(c).empty());
  c.train.accumulate_dtype = "bf16";
  CHECK(refusal(c).empty());
  c.train.accumulate_dtype = "fp16";
  CHECK(refusal(c).find("accumulate_dtype=fp16 with precision=fp8") != std::string::npos);
  c.train.accumulate_dtype = "";
  c.train.fp8_scaling = Fp8Scaling::kDelayed;
  c.backend = BackendKind::kCuda;
  c.transport = TransportKind::kOneGpu;
  CHECK(refusal(c).find("precision=fp8 with backend=cuda") != std::string::npos);
  c.backend = BackendKind::kCpu;
  c.transport = TransportKind::kThreads;
  c.train.precision = Precision::kBf16;
  CHECK(refusal(c).find("fp8_scaling") != std::string::npos);
}

}  // namespace
}  // namespace shardlab::testing
