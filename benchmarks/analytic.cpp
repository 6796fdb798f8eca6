// What an analytic estimate costs: one point, a kind of layer never seen, and the exhaustive grid of 175B on 64 GPUs.
//
// Targets (release build, one core): a million evaluations a second (time, worst stage's live peak, ten parts), the grid of 3.2
// million points that Calculon enumerates in under 5 s.
#include <benchmark/benchmark.h>

#include <vector>

#include "simulator/estimator/analytic/analytic.h"

namespace shardlab::simulator::analytic {
namespace {

ModelShape gpt_175b() {
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

Prepared study(int nodes) {
  Machine m;
  m.id = "a100-nodes", m.devices_per_node = 8, m.nodes = nodes, m.inter_bytes_per_s = 25e9;
  m.device.id = "a100", m.device.architecture = "ampere", m.device.memory_bytes = 84'986'036'224;
  m.device.memory_bytes_per_s = 2.039e12, m.device.link_bytes_per_s = 300e9, m.device.power_w = 400;
  m.device.peak_flops = {{"fp32", 19.5e12}, {"bf16", 312e12}, {"fp16", 312e12}};
  return *prepare(gpt_175b(), m, *profile_named("megatron"));
}

/// Calls `visit` with every point of 175B on 64 devices with 64 sequences a step: layouts, schedules, micro-batches, recompute,
/// ZeRO, overlap, offload, precision.
template <class Visit>
void each_point(const Visit& visit) {
  const std::vector<const char*> recomputes{
      "none", "selective", "full", "norms", "activation", "norms+activation", "attention-core+norms"};
  Point p;
  p.seq_len = 2048;
  for (int tp = 1; tp <= 64; tp *= 2)
    for (int pp = 1; pp * tp <= 64; pp *= 2)
      for (int cp = 1; cp * pp * tp <= 64 && cp <= 8; cp *= 2)
        for (int micro = 1; micro <= 64; micro *= 2) {
          p.tp = tp, p.pp = pp, p.cp = cp, p.dp = 64 / (tp * pp * cp), p.micro_batch = micro;
          if (64 % (p.dp * micro) != 0) continue;
          p.grad_accumulation = 64 / (p.dp * micro);
          for (const char* recompute : recomputes)
            for (const bool parallel : {false, true})
              for (const int tensor_overlap : {0, 1}) {
                read(recompute, &p.recompute);
                p.sequence_parallel = parallel, p.tensor_overlap = static_cast<int8_t>(tensor_overlap);
                for (int zero = 0; zero <= 3; ++zero)
                  for (const int overlap : {0, 1})
                    for (const Medium optimizer : {Medium::kDevice, Medium::kCpu})
                      for (const Medium activations : {Medium::kDevice, Medium::kCpu})
                        for (int schedule = 0; schedule < 12; ++schedule)
                          for (int vpp = 1; vpp <= 12; vpp = vpp == 1 ? 2 : vpp + 2) {
                            p.schedule = static_cast<Schedule>(schedule), p.vpp = vpp, p.zero = zero;
                            p.overlap = static_cast<int8_t>(overlap), p.offload_optimizer = optimizer,
                            p.offload_activations = activations;
                            visit(p);
                          }
              }
        }
}

/// Points of which each differs from the one before in what a layer costs or in how layers are laid out.
void one_point(benchmark::State& state) {
  Estimator estimator(study(8));
  std::vector<Point> points;
  uint64_t i = 0;
  each_point([&](const Point& p) {
    if (++i % 977 == 0 && estimator(p).legal()) points.push_back(p);
  });
  size_t next = 0;
  for (auto _ : state) {
    benchmark::DoNotOptimize(estimator(points[next]));
    if (++next == points.size()) next = 0;
  }
  state.SetItemsProcessed(state.iterations());
  state.counters["points"] = static_cast<double>(points.size());
}
BENCHMARK(one_point);

void new_kind_of_layer(benchmark::State& state) {
  const Prepared prepared = study(8);
  for (auto _ : state)
    benchmark::DoNotOptimize(estimate(prepared, {.dp = 1, .tp = 8, .pp = 8, .schedule = Schedule::k1F1B, .grad_accumulation = 64}));
}
BENCHMARK(new_kind_of_layer)->Unit(benchmark::kMicrosecond);

void grid_of_175b_on_64(benchmark::State& state) {
  const Prepared prepared = study(8);
  uint64_t evaluated = 0, legal = 0;
  double best = 1e300;
  for (auto _ : state) {
    Estimator estimator(prepared);
    each_point([&](const Point& p) {
      const Estimate e = estimator(p);
      ++evaluated;
      if (!e.legal()) return;
      ++legal;
      if (e.step_s < best && e.memory.device() < prepared.machine().device.memory_bytes) best = e.step_s;
    });
  }
  const auto runs = static_cast<double>(state.iterations());
  state.counters["points"] = static_cast<double>(evaluated) / runs;
  state.counters["legal"] = static_cast<double>(legal) / runs;
  state.counters["best_step_s"] = best;
  state.SetItemsProcessed(static_cast<int64_t>(evaluated));
}
BENCHMARK(grid_of_175b_on_64)->Unit(benchmark::kSecond)->Iterations(1);

}  // namespace
}  // namespace shardlab::simulator::analytic
