// What a step costs beside its kernels: the executor's loop over bound instructions with a back end that does nothing, one stream
// waking another, and the collectives of the thread transport by size.
#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "plan/text.h"
#include "runtime/session.h"
#include "runtime/thread_transport.h"

namespace shardlab {

using namespace runtime;
namespace {

/// One rank with `ops` additions, each on the next of `streams` streams.
Plan chain(int ops, int streams) {
  std::string text =
      "shardlab plan 1\nname chain\nmesh pp=1 dp=1 cp=1 tp=1\nmicro_batches 1\nsequences_per_micro_batch 1\nperiod 1\nstreams "
      "compute";
  for (int s = 1; s < streams; ++s) text += fmt::format(" s{}", s);
  text += "\nstrategies none\n";
  for (int s = 0; s < streams; ++s)
    text += fmt::format(
        "\nsegment step{0}\n  bound %x other f32[16]\n  local %y other f32[16] view %x\n  add step (%x, %x) -> (%y){1}\n", s,
        s == 0 ? "" : fmt::format(" @s{}", s));
  text += "\nrole 0\n  %x other f32[16] persistent\n";
  for (int i = 0; i < ops; ++i) text += fmt::format("  call step{} (x=%x)\n", i % streams);
  auto plan = parse_plan(text);
  SHARDLAB_CHECK(plan.ok(), "{}", to_string(plan.error()));
  return std::move(plan).value();
}

/// One all_reduce of `elements` over `ranks`, repeated.
Plan reductions(int ranks, int64_t elements, int repeats, std::string_view algorithm) {
  std::string text = fmt::format(
      "shardlab plan 1\nname sums\nmesh pp=1 dp={0} cp=1 tp=1\nmicro_batches 1\nsequences_per_micro_batch 1\nperiod 1\nstreams "
      "compute\n"
      "strategies none\ncomm dp axes dp\n\nsegment sum\n  bound %x other f32[{1}] dp:P\n  local %y other f32[{1}] view %x\n"
      "  all_reduce sum (%x) -> (%y) comm=dp algorithm={2}\n\nrole 0\n  %x other f32[{1}] dp:P persistent\n",
      ranks, elements, algorithm);
  for (int i = 0; i < repeats; ++i) text += "  call sum (x=%x)\n";
  auto plan = parse_plan(text);
  SHARDLAB_CHECK(plan.ok(), "{}", to_string(plan.error()));
  return std::move(plan).value();
}

/// Runs steps of `per_step` ops; returns, and reports as `median_per_op`, the median seconds of an op.
double run_steps(benchmark::State& state, Plan plan, const BackendFactory& backends, int per_step) {
  const PlacedPlan placed = place(std::move(plan));
  ThreadTransport transport(kernels::kernels_for_this_processor());
  auto session = Session::create(placed, {}, transport, backends, nullptr);
  SHARDLAB_CHECK(session.ok(), "{}", to_string(session.error()));
  int64_t step = 0;
  std::vector<double> per_op;
  for (auto _ : state) {
    const double seconds = (*session)->step(step++).seconds;
    state.SetIterationTime(seconds);
    per_op.push_back(seconds / per_step);
  }
  std::ranges::sort(per_op);
  state.counters["median_per_op"] = per_op[per_op.size() / 2];
  return per_op[per_op.size() / 2];
}

/// Seconds an op takes to dispatch: one rank, one stream, no recorder, a back end that does nothing.
void dispatch(benchmark::State& state) {
  const int ops = static_cast<int>(state.range(0));
  run_steps(state, chain(ops, 1), dry_backend(), ops);
}
BENCHMARK(dispatch)->Arg(1000)->Arg(10000)->UseManualTime();

/// Seconds until an op on one stream has woken the next op on another.
void wake(benchmark::State& state) { run_steps(state, chain(1000, static_cast<int>(state.range(0))), dry_backend(), 1000); }
BENCHMARK(wake)->Arg(2)->Arg(4)->UseManualTime();

/// Seconds of an all_reduce, and the bus bandwidth as nccl-tests defines it.
void all_reduce(benchmark::State& state, std::string_view algorithm) {
  const int ranks = static_cast<int>(state.range(0)), repeats = 20;
  const int64_t bytes = state.range(1);
  const double seconds =
      run_steps(state, reductions(ranks, bytes / 4, repeats, algorithm), cpu_backend(kernels::kernels_for_this_processor(), {}), repeats);
  state.counters["busbw"] = 2.0 * (ranks - 1) / ranks * static_cast<double>(bytes) / seconds;
}
BENCHMARK_CAPTURE(all_reduce, ring, "ring")->ArgsProduct({{2, 8}, {1 << 10, 1 << 16, 1 << 20, 1 << 24}})->UseManualTime();
BENCHMARK_CAPTURE(all_reduce, direct, "direct")->ArgsProduct({{2, 8}, {1 << 10, 1 << 16, 1 << 20, 1 << 24}})->UseManualTime();

}  // namespace
}  // namespace shardlab
