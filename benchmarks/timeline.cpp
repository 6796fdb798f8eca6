// What a timeline costs: one simulated step, op by op from expanded programs to a trace, and by segments from a condensed plan to a
// step's parts.
//
// Aim: 2,000 steps a second by segments for a model of 175 billion parameters on 8 stages with 64 micro-batches, of a plan that
// stays and a machine that is new each time: all of its costs are asked for again.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>

#include "benchmarks/gpt3.h"
#include "plan/program.h"
#include "simulator/interpreter/cost_model.h"
#include "simulator/interpreter/segments/segments.h"
#include "simulator/interpreter/timeline.h"
#include "strategies/lower.h"

namespace shardlab {

using namespace simulator;
using namespace strategies;
namespace {

Plan lowered(const Case& c) {
  Result<Plan> plan = lower(c, {.after = {}, .verify = false});
  SHARDLAB_CHECK(plan.ok(), "{}", to_string(plan.error()));
  return std::move(plan).value();
}

std::vector<Program> expanded(const Plan& plan) {
  std::vector<Program> programs;
  for (size_t role = 0; role < plan.roles.size(); ++role) programs.push_back(expand_program(plan, static_cast<int>(role)));
  return programs;
}

int64_t instructions_of(const std::vector<Program>& programs) {
  int64_t instructions = 0;
  for (const Program& p : programs) instructions += static_cast<int64_t>(p.instructions.size());
  return instructions;
}

/// One rank a stage: all ranks of a stage do the same.
Trace op_by_op(const Case& c, const Plan& plan, const std::vector<Program>& programs) {
  return simulate(plan, programs, c.machine, DatasheetCostModel(c.machine, Precision::kFp32), {.max_individual_ranks = 1});
}

void simulate_step(benchmark::State& state, int pp, int64_t micro_batches) {
  const Case c = gpt3_175b(pp, micro_batches);
  const Plan plan = lowered(c);
  const std::vector<Program> programs = expanded(plan);
  for (auto _ : state) benchmark::DoNotOptimize(op_by_op(c, plan, programs).events.data());
  const double instructions = static_cast<double>(instructions_of(programs));
  state.counters["instructions"] = instructions;
  state.counters["instructions/s"] = benchmark::Counter(instructions, benchmark::Counter::kIsIterationInvariantRate);
}

double seconds_now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

/// The same step by segments. `times_op_by_op`: how often it is done while the other is done once, in this run.
void segments_step(benchmark::State& state, int pp, int64_t micro_batches) {
  const Case c = gpt3_175b(pp, micro_batches);
  const Plan plan = lowered(c);
  const std::vector<Program> programs = expanded(plan);
  double other = 1e30;
  for (int i = 0; i < 3; ++i) {
    const double begin = seconds_now();
    benchmark::DoNotOptimize(op_by_op(c, plan, programs).events.data());
    other = std::min(other, seconds_now() - begin);
  }
  SegmentTimeline timeline(plan, programs);
  const double begin = seconds_now();
  for (auto _ : state) benchmark::DoNotOptimize(timeline.step(c.machine, DatasheetCostModel(c.machine, Precision::kFp32)).seconds);
  const double each = (seconds_now() - begin) / static_cast<double>(state.iterations());
  state.counters["entries"] = static_cast<double>(timeline.entries());
  state.counters["times_op_by_op"] = other / each;
  state.counters["steps/s"] = benchmark::Counter(1, benchmark::Counter::kIsIterationInvariantRate);
}

/// What comes before, once a plan.
void condense_plan(benchmark::State& state, int pp, int64_t micro_batches) {
  const Case c = gpt3_175b(pp, micro_batches);
  const Plan plan = lowered(c);
  const std::vector<Program> programs = expanded(plan);
  for (auto _ : state) benchmark::DoNotOptimize(SegmentTimeline(plan, programs).entries());
}

/// From a layout to the parts of its step.
void segments_from_case(benchmark::State& state, int pp, int64_t micro_batches) {
  const Case c = gpt3_175b(pp, micro_batches);
  for (auto _ : state) {
    const Plan plan = lowered(c);
    SegmentTimeline timeline(plan);
    benchmark::DoNotOptimize(timeline.step(c.machine, DatasheetCostModel(c.machine, Precision::kFp32)).seconds);
  }
}

void pp1_m1(benchmark::State& state) { simulate_step(state, 1, 1); }
void pp8_m8(benchmark::State& state) { simulate_step(state, 8, 8); }
void pp8_m64(benchmark::State& state) { simulate_step(state, 8, 64); }

void segments_pp1_m1(benchmark::State& state) { segments_step(state, 1, 1); }
void segments_pp8_m8(benchmark::State& state) { segments_step(state, 8, 8); }
void segments_pp8_m64(benchmark::State& state) { segments_step(state, 8, 64); }
void condense_pp8_m64(benchmark::State& state) { condense_plan(state, 8, 64); }
void segments_from_case_pp8_m64(benchmark::State& state) { segments_from_case(state, 8, 64); }

BENCHMARK(pp1_m1)->Unit(benchmark::kMillisecond);
BENCHMARK(pp8_m8)->Unit(benchmark::kMillisecond);
BENCHMARK(pp8_m64)->Unit(benchmark::kMillisecond);
BENCHMARK(segments_pp1_m1)->Unit(benchmark::kMillisecond);
BENCHMARK(segments_pp8_m8)->Unit(benchmark::kMillisecond);
BENCHMARK(segments_pp8_m64)->Unit(benchmark::kMillisecond);
BENCHMARK(condense_pp8_m64)->Unit(benchmark::kMillisecond);
BENCHMARK(segments_from_case_pp8_m64)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace shardlab
