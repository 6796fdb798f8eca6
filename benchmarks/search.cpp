// What a search costs: 175B on 64 devices, and a mixture of 10^12 parameters on 4,096, with bounds and without.
//
// Targets (release build, one core): the first, every point estimated, under 5 s; the second under 60 s.
#include <benchmark/benchmark.h>

#include "simulator/estimator/search/search.h"

namespace shardlab::simulator::search {
namespace {

analytic::ModelShape gpt_175b() {
  return {.layers = 96,
          .hidden = 12288,
          .heads = 96,
          .kv_heads = 96,
          .head_dim = 128,
          .ffn = 49152,
          .vocab = 51200,
          .max_positions = 2048,
          .tied_embeddings = true,
          .biases = true};
}

/// The shape of Kimi K2 (Moonshot AI 2025, config.json): latent attention, 384 experts, 8 a token, one shared, first layer dense.
analytic::ModelShape mixture_1t() {
  return {.layers = 61,
          .hidden = 7168,
          .heads = 64,
          .kv_heads = 64,
          .head_dim = 128,
          .ffn = 18432,
          .vocab = 163840,
          .swiglu = true,
          .rms_norm = true,
          .experts = 384,
          .top_k = 8,
          .moe_ffn = 2048,
          .shared_experts = 1,
          .dense_layers = 1,
          .q_rank = 1536,
          .kv_rank = 512,
          .rope_dim = 64,
          .v_dim = 128};
}

Study study(const analytic::ModelShape& shape, int32_t devices) {
  Machine m;
  m.id = "h100-nodes", m.devices_per_node = 8, m.nodes = devices / 8, m.inter_bytes_per_s = 50e9;
  m.device.id = "h100", m.device.architecture = "hopper", m.device.memory_bytes = 85'030'076'416;
  m.device.memory_bytes_per_s = 3.35e12, m.device.link_bytes_per_s = 450e9, m.device.power_w = 700;
  m.device.peak_flops = {{"fp32", 67e12}, {"bf16", 989e12}, {"fp16", 989e12}, {"fp8", 1979e12}};
  analytic::FrameworkProfile profile = *analytic::profile_named("megatron");
  profile.can = {};  // every layout that can be written down, whoever has it
  return {devices, *prepare(shape, m, profile)};
}

void run(benchmark::State& state, const Study& study, const Space& space, bool prune) {
  Found found;
  for (auto _ : state) found = search({&study, 1}, space, {.capacity_bytes = 85'030'076'416, .prune = prune});
  state.counters["points"] = static_cast<double>(found.counts.points);
  state.counters["estimated"] = static_cast<double>(found.counts.evaluated);
  state.counters["bounded"] = static_cast<double>(found.counts.bounded);
  state.counters["refused"] = static_cast<double>(found.counts.refused);
  state.counters["front"] = static_cast<double>(found.front.size());
  if (!found.best.empty()) state.counters["best_step_s"] = found.best[0].seconds();
  state.counters["estimated/s"] =
      benchmark::Counter(static_cast<double>(found.counts.evaluated), benchmark::Counter::kIsIterationInvariantRate);
}

void search_of_175b_on_64(benchmark::State& state) {
  run(state, study(gpt_175b(), 64), {.devices = {64}, .seq_len = 2048, .sequences = 64}, state.range(0) != 0);
}
BENCHMARK(search_of_175b_on_64)->ArgName("bounds")->Arg(0)->Arg(1)->Unit(benchmark::kSecond)->Iterations(1);

void search_of_1t_on_4096(benchmark::State& state) {
  run(state, study(mixture_1t(), 4096), {.devices = {4096}, .seq_len = 4096, .sequences = 4096}, true);
}
BENCHMARK(search_of_1t_on_4096)->Unit(benchmark::kSecond)->Iterations(1);

}  // namespace
}  // namespace shardlab::simulator::search
