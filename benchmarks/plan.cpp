// What a plan costs: to lower and verify, to fold, to expand, to print and parse; and what the bytes of a case cost.
//
// Targets (release build): lower and verify under 50 ms for a GPT-2 124M step on 8 ranks, under 2 s for a model of a trillion
// parameters on 4,096 ranks.
#include <benchmark/benchmark.h>

#include "plan/memory.h"
#include "plan/program.h"
#include "plan/text.h"
#include "plan/verify.h"
#include "plan/wire.h"
#include "simulator/interpreter/case_plan.h"
#include "strategies/lower.h"

namespace shardlab {

using namespace simulator;
using namespace strategies;
namespace {

/// A step on dp * tp * pp ranks.
struct Ranks {
  int dp = 1, tp = 1, pp = 1;
  int64_t micro_batches = 1;
};

Case gpt2_124m(const Ranks& ranks) {
  Case c;
  c.name = "gpt2-124m";
  c.model = {.name = "gpt2-124m",
             .family = Family::kGpt,
             .layers = 12,
             .hidden = 768,
             .heads = 12,
             .kv_heads = 12,
             .head_dim = 64,
             .ffn = 3072};
  c.model.vocab = 50304;  // 50,257 padded to a multiple of 64, so that tp divides it
  c.model.max_positions = 1024;
  c.model.tied_embeddings = true;
  c.train.seq_len = 1024;
  c.train.micro_batch = 4;
  c.train.grad_accumulation = ranks.micro_batches;
  c.layout.dp = ranks.dp;
  c.layout.tp = ranks.tp;
  c.layout.pp = ranks.pp;
  c.layout.schedule = ranks.pp > 1 ? Schedule::k1F1B : Schedule::kNone;
  c.layout.bucket_bytes = 25 << 20;
  return c;
}

/// A trillion parameters: 128 layers of 12 * 25,600^2.
Case trillion(int64_t micro_batches) {
  Case c = gpt2_124m({.dp = 8, .tp = 8, .pp = 64, .micro_batches = micro_batches});
  c.name = "1t";
  c.model = {.name = "1t",
             .family = Family::kGpt,
             .layers = 128,
             .hidden = 25600,
             .heads = 160,
             .kv_heads = 160,
             .head_dim = 160,
             .ffn = 102400};
  c.model.vocab = 51200;
  c.model.max_positions = 2048;
  c.train.seq_len = 2048;
  c.train.micro_batch = 1;
  c.layout.recompute = Recompute::kFull;
  c.layout.zero = 1;
  return c;
}

Case one_rank() { return gpt2_124m({.micro_batches = 8}); }
Case dp8() { return gpt2_124m({.dp = 8, .micro_batches = 1}); }
Case dp2_tp2_pp2() { return gpt2_124m({.dp = 2, .tp = 2, .pp = 2, .micro_batches = 8}); }
Case pp8() { return gpt2_124m({.pp = 8, .micro_batches = 32}); }
Case zero_dp4_tp2() {
  Case c = gpt2_124m({.dp = 4, .tp = 2, .micro_batches = 4});
  c.layout.zero = 1;
  return c;
}
Case trillion_64() { return trillion(64); }
Case trillion_128() { return trillion(128); }

Plan plan_of(const Case& c) {
  auto plan = lower(c, {.after = {}, .verify = false});
  SHARDLAB_CHECK(plan.ok(), "{}", to_string(plan.error()));
  return std::move(plan).value();
}

void lower_and_verify(benchmark::State& state, Case (*make)()) {
  const Case c = make();
  for (auto _ : state) {
    const auto plan = lower(c);
    SHARDLAB_CHECK(plan.ok(), "{}", to_string(plan.error()));
    benchmark::DoNotOptimize(plan->roles.data());
  }
}

void lower_only(benchmark::State& state, Case (*make)()) {
  const Case c = make();
  for (auto _ : state) benchmark::DoNotOptimize(plan_of(c).roles.data());
}

void verify_only(benchmark::State& state, Case (*make)()) {
  const Plan plan = plan_of(make());
  for (auto _ : state) benchmark::DoNotOptimize(find_faults(plan).size());
}

void expand(benchmark::State& state, Case (*make)()) {
  const Plan plan = plan_of(make());
  int64_t instructions = 0;
  for (auto _ : state)
    for (size_t role = 0; role < plan.roles.size(); ++role)
      instructions += static_cast<int64_t>(expand_program(plan, static_cast<int>(role)).instructions.size());
  state.SetItemsProcessed(instructions);
}

void peak(benchmark::State& state, Case (*make)()) {
  const Plan plan = plan_of(make());
  for (auto _ : state)
    for (size_t role = 0; role < plan.roles.size(); ++role)
      benchmark::DoNotOptimize(memory_peak(plan, static_cast<int>(role))[0].peak_bytes);
}

void wire(benchmark::State& state, Case (*make)()) {
  const Plan plan = plan_of(make());
  for (auto _ : state) benchmark::DoNotOptimize(total_wire_bytes(plan).size());
}

void print_text(benchmark::State& state, Case (*make)()) {
  const Plan plan = plan_of(make());
  int64_t bytes = 0;
  for (auto _ : state) bytes += static_cast<int64_t>(print(plan).size());
  state.SetBytesProcessed(bytes);
}

void parse_text(benchmark::State& state, Case (*make)()) {
  const std::string text = print(plan_of(make()));
  for (auto _ : state) {
    const auto plan = parse_plan(text);
    SHARDLAB_CHECK(plan.ok(), "{}", to_string(plan.error()));
  }
  state.SetBytesProcessed(static_cast<int64_t>(text.size()) * state.iterations());
}

/// Memory and wire bytes of a case by its plan, short plans included: what `memory` and `search` say of a layout.
void case_bytes(benchmark::State& state, Case (*make)()) {
  const Case c = make();
  const auto unverified = [](const Case& few) { return lower(few, {.after = {}, .verify = false}); };
  for (auto _ : state) benchmark::DoNotOptimize(CasePlan::of(c, unverified)->bytes().peak_bytes);
}

#define SHARDLAB_ON_EACH(what)                                                      \
  BENCHMARK_CAPTURE(what, one_rank, one_rank)->Unit(benchmark::kMicrosecond);       \
  BENCHMARK_CAPTURE(what, dp2_tp2_pp2, dp2_tp2_pp2)->Unit(benchmark::kMicrosecond); \
  BENCHMARK_CAPTURE(what, trillion_64, trillion_64)->Unit(benchmark::kMicrosecond)

SHARDLAB_ON_EACH(lower_and_verify);
BENCHMARK_CAPTURE(lower_and_verify, dp8, dp8)->Unit(benchmark::kMicrosecond);
BENCHMARK_CAPTURE(lower_and_verify, pp8, pp8)->Unit(benchmark::kMicrosecond);
BENCHMARK_CAPTURE(lower_and_verify, zero_dp4_tp2, zero_dp4_tp2)->Unit(benchmark::kMicrosecond);
BENCHMARK_CAPTURE(lower_and_verify, trillion_128, trillion_128)->Unit(benchmark::kMicrosecond);
SHARDLAB_ON_EACH(lower_only);
SHARDLAB_ON_EACH(verify_only);
SHARDLAB_ON_EACH(expand);
SHARDLAB_ON_EACH(peak);
SHARDLAB_ON_EACH(wire);
SHARDLAB_ON_EACH(print_text);
SHARDLAB_ON_EACH(parse_text);
SHARDLAB_ON_EACH(case_bytes);
BENCHMARK_CAPTURE(case_bytes, pp8, pp8)->Unit(benchmark::kMicrosecond);
BENCHMARK_CAPTURE(case_bytes, trillion_128, trillion_128)->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace shardlab
