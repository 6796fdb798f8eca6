// What an answer of the memory calculator costs: the items of every stage with the allocator replayed, and the look at what to
// change.
//
// Target (release build, one core): an answer with its advice in under 50 ms.
#include <benchmark/benchmark.h>

#include "simulator/estimator/analytic/analytic.h"
#include "simulator/estimator/memory/answer.h"
#include "simulator/estimator/memory/changes.h"
#include "simulator/interpreter/case_plan.h"
#include "strategies/lower.h"

namespace shardlab::simulator::whatif {
namespace {

constexpr int64_t kCapacity = 80'000'000'000;

analytic::Prepared llama_405b(const char* profile) {
  Machine m;
  m.id = "h100-nodes", m.devices_per_node = 8, m.nodes = 64, m.inter_bytes_per_s = 50e9;
  m.device.id = "h100", m.device.architecture = "hopper", m.device.memory_bytes = kCapacity;
  m.device.memory_bytes_per_s = 3.35e12, m.device.link_bytes_per_s = 450e9, m.device.power_w = 700;
  m.device.peak_flops = {{"fp32", 67e12}, {"bf16", 989e12}, {"fp16", 989e12}, {"fp8", 1979e12}};
  const analytic::ModelShape shape{.layers = 126,
                                   .hidden = 16384,
                                   .heads = 128,
                                   .kv_heads = 8,
                                   .head_dim = 128,
                                   .ffn = 53248,
                                   .vocab = 128256,
                                   .swiglu = true,
                                   .rms_norm = true};
  return *analytic::prepare(shape, m, *analytic::profile_named(profile));
}

/// 16 stages, each replayed; then every combination of three changes.
void memory_answer(benchmark::State& state, const char* profile) {
  const analytic::Point point{.dp = 4,
                              .tp = 8,
                              .pp = 16,
                              .zero = 1,
                              .schedule = analytic::Schedule::k1F1B,
                              .sequence_parallel = true,
                              .micro_batch = 1,
                              .grad_accumulation = 64,
                              .seq_len = 8192};
  for (auto _ : state) {
    const analytic::Prepared prepared = llama_405b(profile);
    analytic::Estimator estimator(prepared);
    benchmark::DoNotOptimize(analytic_answer(prepared, estimator, point, kCapacity));
    benchmark::DoNotOptimize(advise(estimator, prepared.profile(), point, {.capacity = kCapacity}));
  }
}
/// Of shardlab's own executor: the fold of a plan, and what is held at the peak of each stage.
void planned_answer(benchmark::State& state) {
  Case c;
  c.name = "405b";
  c.model = {.name = "405b", .family = Family::kLlama, .layers = 126, .hidden = 16384, .heads = 128, .kv_heads = 8, .head_dim = 128, .ffn = 53248};
  c.model.vocab = 128256;
  c.layout.dp = 4, c.layout.tp = 8, c.layout.pp = 16, c.layout.zero = 1;
  c.layout.schedule = Schedule::k1F1B;
  c.layout.bucket_bytes = 25 << 20;
  c.train.seq_len = 8192, c.train.grad_accumulation = 64, c.train.precision = Precision::kBf16;
  for (auto _ : state) {
    const auto plan = CasePlan::of(c, [](const Case& few) { return strategies::lower(few, {.after = {}, .verify = false}); });
    SHARDLAB_CHECK(plan.ok(), "{}", to_string(plan.error()));
    for (int stage = 0; stage < c.layout.pp; ++stage) benchmark::DoNotOptimize(held_at_peak(plan->plan(), stage));
  }
}
BENCHMARK(planned_answer)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(memory_answer, megatron, "megatron")->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(memory_answer, torchtitan, "torchtitan")->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace shardlab::simulator::whatif
