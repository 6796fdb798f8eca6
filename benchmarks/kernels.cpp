// Rates of the CPU kernels: GF/s where arithmetic bounds them, GB/s (of the bytes their docstrings count) where memory does.
//
// Two models: GPT-2 124M's shapes (hidden 768, 12 heads, ffn 3072, vocab 50257, one sequence of 1024 tokens) and a small one
// (hidden 128, 4 heads, ffn 512, vocab 256, four sequences of 256 tokens). One thread. Inputs are random, never zeros.
#include <benchmark/benchmark.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "kernels/kernels.h"

namespace shardlab {
namespace {

struct Shape {
  const char* name;
  int64_t sequences, tokens, hidden, heads, ffn, vocab;
  int64_t rows() const { return sequences * tokens; }
};
constexpr Shape kGpt2{"gpt2-124m", 1, 1024, 768, 12, 3072, 50257};
constexpr Shape kSmall{"small", 4, 256, 128, 4, 512, 256};

/// n floats in [-1, 1), 64-byte aligned.
class Floats {
 public:
  explicit Floats(int64_t n) : data_(static_cast<float*>(std::aligned_alloc(64, static_cast<size_t>((n * 4 + 127) / 64 * 64)))) {
    uint32_t state = 12345;
    for (int64_t i = 0; i < n; ++i) {
      state = state * 1664525u + 1013904223u;
      data_[i] = static_cast<float>(static_cast<int32_t>(state)) * 4.6566e-10f;
    }
  }
  ~Floats() { std::free(data_); }
  Floats(const Floats&) = delete;
  Floats& operator=(const Floats&) = delete;
  operator float*() { return data_; }

 private:
  float* data_;
};

void report(benchmark::State& state, double flops, double bytes) {
  const auto rate = benchmark::Counter::kIsIterationInvariantRate;
  if (flops > 0) state.counters["GF/s"] = benchmark::Counter(flops * 1e-9, rate);
  if (bytes > 0) state.counters["GB/s"] = benchmark::Counter(bytes * 1e-9, rate);
}

enum class Phase { kF, kI, kW };

void linear(benchmark::State& state, const kernels::Kernels& k, int64_t sequences, int64_t tokens, int64_t in, int64_t out, Phase phase,
            bool canonical) {
  const int64_t rows = sequences * tokens;
  Floats x(rows * in), w(out * in), y(rows * out);
  kernels::LinearForward f{.x = x, .w = w, .y = y, .rows = rows, .in = in, .out = out, .canonical = canonical};
  kernels::LinearInput i{.dy = y, .w = w, .dx = x, .rows = rows, .in = in, .out = out, .canonical = canonical};
  kernels::LinearWeight g{
      .x = x, .dy = y, .dw = w, .tokens = {sequences, tokens, {}}, .in = in, .out = out, .canonical = canonical};
  const int64_t bytes = phase == Phase::kF   ? linear_scratch_bytes(f)
                        : phase == Phase::kI ? linear_scratch_bytes(i)
                                             : linear_scratch_bytes(g);
  Floats scratch(bytes / 4);
  f.scratch = i.scratch = g.scratch = static_cast<float*>(scratch);
  for (auto _ : state) {
    if (phase == Phase::kF) k.linear_forward(f);
    if (phase == Phase::kI) k.linear_input(i);
    if (phase == Phase::kW) k.linear_weight(g);
  }
  report(state, 2.0 * static_cast<double>(rows * in * out), 0);
}

void attention(benchmark::State& state, const kernels::Kernels& k, const Shape& s, bool backward) {
  const kernels::AttentionShape shape{s.sequences, s.tokens, static_cast<int>(s.heads), static_cast<int>(s.heads),
                                      static_cast<int>(s.hidden / s.heads)};
  Floats qkv(s.rows() * 3 * s.hidden), o(s.rows() * s.hidden), lse(s.rows() * s.heads), dout(s.rows() * s.hidden),
      dqkv(s.rows() * 3 * s.hidden);
  kernels::AttentionForward f{.shape = shape, .qkv = qkv, .o = o, .lse = lse};
  kernels::AttentionInput i{.shape = shape, .dout = dout, .o = o, .lse = lse, .qkv = qkv, .dqkv = dqkv};
  Floats scratch((attention_scratch_bytes(f) + attention_scratch_bytes(i)) / 4);
  f.scratch = i.scratch = static_cast<float*>(scratch);
  k.attention_forward(f);
  for (auto _ : state) backward ? k.attention_input(i) : k.attention_forward(f);
  const double forward_flops = 2.0 * static_cast<double>(s.sequences * s.tokens * (s.tokens + 1) * s.hidden);
  report(state, backward ? 2.5 * forward_flops : forward_flops, 0);
}

void norm(benchmark::State& state, const kernels::Kernels& k, const Shape& s, Phase phase, bool rms) {
  const int64_t n = s.rows() * s.hidden;
  Floats x(n), y(n), dy(n), gamma(s.hidden), beta(s.hidden), stats(2 * s.rows()), dgamma(s.hidden), dbeta(s.hidden);
  const auto forward = [&] {
    k.norm_forward({.x = x, .gamma = gamma, .beta = beta, .y = y, .stats = stats, .rows = s.rows(), .width = s.hidden, .rms = rms});
  };
  forward();
  for (auto _ : state) {
    if (phase == Phase::kF) forward();
    if (phase == Phase::kI)
      k.norm_input({.dy = dy, .x = x, .gamma = gamma, .stats = stats, .dx = y, .rows = s.rows(), .width = s.hidden, .rms = rms});
    if (phase == Phase::kW)
      k.norm_weight({.dy = dy,
                     .x = x,
                     .stats = stats,
                     .dgamma = dgamma,
                     .dbeta = dbeta,
                     .tokens = {s.sequences, s.tokens, {}},
                     .width = s.hidden,
                     .rms = rms});
  }
  report(state, 0, (phase == Phase::kI ? 12.0 : 8.0) * static_cast<double>(n));
}

void activation(benchmark::State& state, const kernels::Kernels& k, const Shape& s, bool backward, bool swiglu) {
  const int64_t n = s.rows() * s.ffn;
  Floats u(2 * n), a(n), du(2 * n);
  for (auto _ : state) {
    if (backward)
      k.activation_input({.da = a, .u = u, .du = du, .n = n, .swiglu = swiglu});
    else
      k.activation_forward({.u = u, .a = a, .n = n, .swiglu = swiglu});
  }
  const double inputs = swiglu ? 2 : 1;
  report(state, 0, 4.0 * static_cast<double>(n) * (1 + inputs * (backward ? 2 : 1)));
}

void cross_entropy(benchmark::State& state, const kernels::Kernels& k, const Shape& s) {
  const int64_t n = s.rows() * s.vocab;
  Floats logits(n), nll(s.sequences);
  std::vector<int32_t> targets(static_cast<size_t>(s.rows()));
  for (size_t i = 0; i < targets.size(); ++i) targets[i] = static_cast<int32_t>((i * 7919) % static_cast<size_t>(s.vocab));
  for (auto _ : state)
    k.cross_entropy_fused({.logits = logits,
                           .targets = targets.data(),
                           .nll = nll,
                           .tokens = {s.sequences, s.tokens, {}},
                           .vocab = s.vocab,
                           .loss_tokens = 1});
  report(state, 0, 16.0 * static_cast<double>(n));
}

void embed(benchmark::State& state, const kernels::Kernels& k, const Shape& s, bool backward) {
  Floats table(s.vocab * s.hidden), x(s.rows() * s.hidden);
  std::vector<int32_t> ids(static_cast<size_t>(s.rows()));
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>((i * 7919) % static_cast<size_t>(s.vocab));
  kernels::EmbedWeight w{.ids = ids.data(),
                         .dx = x,
                         .dtable = table,
                         .sequences = s.sequences,
                         .tokens = s.tokens,
                         .width = s.hidden,
                         .table_rows = s.vocab};
  Floats scratch(embed_scratch_bytes(w) / 4);
  w.scratch = static_cast<float*>(scratch);
  for (auto _ : state) {
    if (backward)
      k.embed_weight(w);
    else
      k.embed_forward({.ids = ids.data(), .table = table, .x = x, .rows = s.rows(), .width = s.hidden, .table_rows = s.vocab});
  }
  report(state, 0, 4.0 * static_cast<double>(backward ? (s.rows() + s.vocab) * s.hidden : 2 * s.rows() * s.hidden));
}

void elementwise(const kernels::Kernels& k, const Shape& s, const std::string& suffix) {
  const int64_t n = s.rows() * s.hidden, parameters = 12 * s.hidden * s.hidden;  // of one layer
  const auto add = [&](const char* name, double bytes, int64_t elements, auto body) {
    benchmark::RegisterBenchmark((name + suffix).c_str(), [=](benchmark::State& state) {
      Floats a(elements), b(elements), c(elements), d(elements);
      for (int64_t i = 0; i < elements; ++i) d[i] *= d[i];  // a second moment is not negative
      for (auto _ : state) body(a, b, c, d);
      report(state, 0, bytes * static_cast<double>(elements));
    });
  };
  const kernels::Kernels* kernels = &k;
  add("residual_forward", 12, n, [=](float* a, float* b, float* c, float* bias) {
    kernels->residual_forward({.x = a, .z = b, .bias = bias, .y = c, .rows = s.rows(), .width = s.hidden});
  });
  add("bias_weight", 4, n, [=](float* a, float*, float* c, float*) {
    kernels->bias_weight({.dy = a, .dbias = c, .tokens = {s.sequences, s.tokens, {}}, .width = s.hidden});
  });
  add("dropout", 8, n, [=](float* a, float*, float*, float*) {
    kernels->dropout({.z = a,
                      .sequences = s.sequences,
                      .tokens = s.tokens,
                      .width = s.hidden,
                      .p = 1e-6f,
                      .key = {.seed = 1, .use = RandomUse::kDropout}});
  });
  add("positions_forward", 12, n, [=](float* a, float* b, float* c, float*) {
    kernels->positions_forward({.x = a, .table = b, .y = c, .sequences = s.sequences, .tokens = s.tokens, .width = s.hidden});
  });
  add("positions_weight", 4, n, [=](float* a, float* b, float*, float*) {
    kernels->positions_weight({.dx = a, .dtable = b, .sequences = s.sequences, .tokens = s.tokens, .width = s.hidden});
  });
  add("add", 12, n, [=](float* a, float* b, float* c, float*) { kernels->add({.a = a, .b = b, .c = c, .n = n}); });
  add("fill", 4, n, [=](float* a, float*, float*, float*) { kernels->fill(a, n, 1.0f); });
  add("squared_norm", 4, parameters,
      [=](float* a, float*, float*, float*) { benchmark::DoNotOptimize(kernels->squared_norm(a, parameters)); });
  add("tree_combine_4", 20, parameters, [=](float* a, float* b, float* c, float* d) {
    const float* parts[] = {a, b, c, d};
    kernels->tree_combine({.parts = parts, .count = 4, .out = a, .n = parameters});
  });
  add("sgd", 12, parameters,
      [=](float* a, float* b, float*, float*) { kernels->sgd({.grad = a, .param = b, .n = parameters, .learning_rate = 1e-9f}); });
  add("adamw", 28, parameters, [=](float* a, float* b, float* c, float* d) {
    kernels->adamw(
        {.grad = a, .param = b, .m = c, .v = d, .n = parameters, .step = 10, .learning_rate = 1e-9f, .weight_decay = 0.1f});
  });
}

void rope(benchmark::State& state, const kernels::Kernels& k, const Shape& s, bool with_table) {
  const int depth = static_cast<int>(s.hidden / s.heads), heads = static_cast<int>(s.heads);
  Floats qkv(s.rows() * 3 * s.hidden), table(s.tokens * depth);
  kernels::rope_table(0, s.tokens, depth, 10000.0f, table);
  for (auto _ : state)
    k.rope({.qkv = qkv,
            .sequences = s.sequences,
            .tokens = s.tokens,
            .heads = heads,
            .kv_heads = heads,
            .head_dim = depth,
            .table = with_table ? static_cast<float*>(table) : nullptr});
  report(state, 0, 8.0 * static_cast<double>(s.rows() * 2 * s.hidden));
}

void register_shape(const kernels::Kernels& k, const Shape& s) {
  const std::string suffix = std::string("/") + s.name + "/" + std::string(k.name);
  const auto add = [&](const std::string& name, auto body) {
    benchmark::RegisterBenchmark((name + suffix).c_str(), [=, kernels = &k](benchmark::State& state) { body(state, *kernels); });
  };
  const struct {
    const char* name;
    Phase phase;
  } phases[] = {{"forward", Phase::kF}, {"input", Phase::kI}, {"weight", Phase::kW}};
  for (const auto& p : phases)
    for (const bool canonical : {false, true}) {
      const std::string mode = std::string(p.name) + (canonical ? "_canonical" : "_fast");
      add("linear_up_" + mode, [=](auto& state, const kernels::Kernels& kernels) {
        linear(state, kernels, s.sequences, s.tokens, s.hidden, s.ffn, p.phase, canonical);
      });
      add("linear_down_" + mode, [=](auto& state, const kernels::Kernels& kernels) {
        linear(state, kernels, s.sequences, s.tokens, s.ffn, s.hidden, p.phase, canonical);
      });
      add("linear_head_" + mode, [=](auto& state, const kernels::Kernels& kernels) {
        linear(state, kernels, s.sequences, s.tokens, s.hidden, s.vocab, p.phase, canonical);
      });
    }
  for (const bool backward : {false, true}) {
    const std::string phase = backward ? "_input" : "_forward";
    add("attention" + phase, [=](auto& state, const kernels::Kernels& kernels) { attention(state, kernels, s, backward); });
    add("gelu" + phase, [=](auto& state, const kernels::Kernels& kernels) { activation(state, kernels, s, backward, false); });
    add("swiglu" + phase, [=](auto& state, const kernels::Kernels& kernels) { activation(state, kernels, s, backward, true); });
    add(backward ? "embed_weight" : "embed_forward",
        [=](auto& state, const kernels::Kernels& kernels) { embed(state, kernels, s, backward); });
  }
  for (const auto& p : phases)
    for (const bool rms : {false, true})
      add(std::string(rms ? "rmsnorm_" : "layernorm_") + p.name,
          [=](auto& state, const kernels::Kernels& kernels) { norm(state, kernels, s, p.phase, rms); });
  add("cross_entropy_fused", [=](auto& state, const kernels::Kernels& kernels) { cross_entropy(state, kernels, s); });
  add("rope", [=](auto& state, const kernels::Kernels& kernels) { rope(state, kernels, s, false); });
  add("rope_with_table", [=](auto& state, const kernels::Kernels& kernels) { rope(state, kernels, s, true); });
  elementwise(k, s, suffix);
}

/// Every variant that this processor runs, best first; --benchmark_filter picks: "attention.*/small/x86-64-v4".
const bool registered = [] {
  for (const kernels::Kernels* k : kernels::all_variants())
    if (kernels::runs_here(*k))
      for (const Shape& s : {kGpt2, kSmall}) register_shape(*k, s);
  return true;
}();

}  // namespace
}  // namespace shardlab
