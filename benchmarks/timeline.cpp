// What a timeline costs: one simulated step, from expanded programs to a trace, and the instructions a second that this is.
//
// Aim: 2,000 steps a second for a model of 175 billion parameters on 8 stages with 64 micro-batches.
#include <benchmark/benchmark.h>

#include "plan/program.h"
#include "simulator/cost_model.h"
#include "simulator/timeline.h"
#include "strategies/lower.h"

namespace shardlab {
namespace {

/// GPT-3 175B, tp 8, on nodes of eight H100.
Case gpt3_175b(int pp, int64_t micro_batches) {
  Case c;
  c.name = "gpt3-175b";
  c.model = {.name = "gpt3-175b",
             .family = Family::kGpt,
             .layers = 96,
             .hidden = 12288,
             .heads = 96,
             .kv_heads = 96,
             .head_dim = 128,
             .ffn = 49152};
  c.model.vocab = 51200;
  c.model.max_positions = 2048;
  c.train.seq_len = 2048;
  c.train.micro_batch = 1;
  c.train.grad_accumulation = micro_batches;
  c.layout.tp = 8;
  c.layout.pp = pp;
  c.layout.schedule = pp > 1 ? Schedule::k1F1B : Schedule::kNone;
  c.machine.device.peak_flops = {{"fp32", 494.7e12}, {"bf16", 989.4e12}};
  c.machine.device.memory_bytes_per_s = 3.35e12;
  c.machine.device.link_bytes_per_s = 450e9;
  c.machine.inter_bytes_per_s = 50e9;
  c.machine.devices_per_node = 8;
  c.machine.nodes = pp;
  return c;
}

/// One rank a stage: all ranks of a stage do the same.
void simulate_step(benchmark::State& state, int pp, int64_t micro_batches) {
  const Case c = gpt3_175b(pp, micro_batches);
  const auto plan = lower(c, {.after = {}, .verify = false});
  SHARDLAB_CHECK(plan.ok(), "{}", to_string(plan.error()));
  std::vector<Program> programs;
  int64_t instructions = 0;
  for (size_t role = 0; role < plan->roles.size(); ++role) {
    programs.push_back(expand_program(*plan, static_cast<int>(role)));
    instructions += static_cast<int64_t>(programs.back().instructions.size());
  }
  const DatasheetCostModel costs(c.machine, "fp32");
  for (auto _ : state)
    benchmark::DoNotOptimize(simulate(*plan, programs, c.machine, costs, {.max_individual_ranks = 1}).events.data());
  state.counters["instructions"] = static_cast<double>(instructions);
  state.counters["instructions/s"] =
      benchmark::Counter(static_cast<double>(instructions), benchmark::Counter::kIsIterationInvariantRate);
}

void pp1_m1(benchmark::State& state) { simulate_step(state, 1, 1); }
void pp8_m8(benchmark::State& state) { simulate_step(state, 8, 8); }
void pp8_m64(benchmark::State& state) { simulate_step(state, 8, 64); }

BENCHMARK(pp1_m1)->Unit(benchmark::kMillisecond);
BENCHMARK(pp8_m8)->Unit(benchmark::kMillisecond);
BENCHMARK(pp8_m64)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace shardlab
