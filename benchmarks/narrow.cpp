// Rates of the kernels on narrow storage, beside the same in fp32: GB/s of casts and of quantisation (all bytes read and written),
// GF/s of Linear. GPT-2 124M's shapes (1024 tokens, hidden 768, ffn 3072). One thread; inputs are random, never zeros.
#include <benchmark/benchmark.h>

#include <vector>

#include "kernels/compress.h"
#include "kernels/library_product.h"
#include "kernels/mixed.h"
#include "kernels/quantise.h"

namespace shardlab {
namespace {

using kernels::MixedKernels;
using kernels::Scratch;
using kernels::Stored;

constexpr DType kTypes[]{DType::bf16, DType::f16, DType::f8e4m3, DType::f8e5m2};

/// Random values in [-1, 1), stored as `type`.
class Values {
 public:
  Values(DType type, int64_t n) : type_(type), bytes_(static_cast<size_t>(bytes_of(type, n))) {
    std::vector<float> x(static_cast<size_t>(n));
    uint32_t state = 12345;
    for (float& v : x) {
      state = state * 1664525u + 1013904223u;
      v = static_cast<float>(static_cast<int32_t>(state)) * 4.6566e-10f;
    }
    kernels::storage_kernels(kernels::kernels_for_this_processor()).narrow({x.data(), n, type, bytes_.data()});
  }
  Stored stored() { return {bytes_.data(), type_, {}}; }

 private:
  DType type_;
  std::vector<std::byte> bytes_;
};

/// Runs `kernel(scratch)` in scratch of the size that it counts.
template <class Kernel>
void run(benchmark::State& state, const Kernel& kernel) {
  Scratch counter = Scratch::counter();
  kernel(counter);
  std::vector<std::byte> lent(static_cast<size_t>(counter.used()) + 64);
  auto* const aligned = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(lent.data()) + 63) / 64 * 64);
  for (auto _ : state) {
    Scratch scratch(aligned);
    kernel(scratch);
    benchmark::ClobberMemory();
  }
}

void report(benchmark::State& state, const char* unit, double amount) {
  state.counters[unit] = benchmark::Counter(amount * 1e-9, benchmark::Counter::kIsIterationInvariantRate);
}

constexpr int64_t kElements = int64_t{1} << 24;  // larger than the caches

void cast(benchmark::State& state, DType from, DType to) {
  const MixedKernels k(kernels::kernels_for_this_processor());
  Values a(from, kElements), b(to, kElements);
  run(state, [&](Scratch& s) { k.copy({a.stored(), b.stored(), kElements}, s); });
  report(state, "GB/s", static_cast<double>(kElements * (bits_of(from) + bits_of(to)) / 8));
}

void round_stochastically(benchmark::State& state, DType to) {
  const kernels::StorageKernels& k = kernels::storage_kernels(kernels::kernels_for_this_processor());
  Values a(DType::f32, kElements), b(to, kElements);
  for (auto _ : state)
    k.narrow_stochastic({static_cast<const float*>(a.stored().data), kElements, to, b.stored().data, {.seed = 1}, 0});
  report(state, "GB/s", static_cast<double>(kElements * (32 + bits_of(to)) / 8));
}

void quantise(benchmark::State& state, int bits) {
  const MixedKernels k(kernels::kernels_for_this_processor());
  Values a(DType::f32, kElements);
  const kernels::BlockShape shape{1, kElements, kElements / 2048, bits};
  std::vector<std::byte> q(static_cast<size_t>(shape.row_bytes()));
  std::vector<float> scales(static_cast<size_t>(shape.blocks));
  run(state, [&](Scratch& s) { block_quantise(k, {shape, a.stored(), q.data(), scales.data()}, s); });
  report(state, "GB/s", static_cast<double>(kElements * (32 + bits) / 8));
}

void select(benchmark::State& state, int64_t part) {
  const MixedKernels k(kernels::kernels_for_this_processor());
  Values a(DType::f32, kElements);
  std::vector<float> values(static_cast<size_t>(kElements / part));
  std::vector<int32_t> indices(values.size());
  run(state, [&](Scratch& s) { top_k(k, {a.stored(), kElements, kElements / part, values.data(), indices.data()}, s); });
  report(state, "GB/s", static_cast<double>(kElements * 4));
}

void linear(benchmark::State& state, DType type, bool canonical, bool library) {
  const MixedKernels k(kernels::kernels_for_this_processor());
  constexpr int64_t kRows = 1024, kIn = 768, kOut = 3072;
  Values x(type, kRows * kIn), w(type, kOut * kIn), y(type, kRows * kOut);
  const auto product =
      library
          ? kernels::LibraryProduct::create({.rows = kRows, .columns = kOut, .depth = kIn, .b_transposed = true, .result = type})
          : nullptr;
  if (library && product == nullptr) return state.SkipWithError("this processor has no bf16 instructions");
  if (product) state.SetLabel(product->implementation());
  run(state, [&](Scratch& s) {
    k.linear_forward({.x = x.stored(),
                      .w = w.stored(),
                      .y = y.stored(),
                      .rows = kRows,
                      .in = kIn,
                      .out = kOut,
                      .canonical = canonical,
                      .product = product.get()},
                     s);
  });
  report(state, "GF/s", 2.0 * kRows * kIn * kOut);
}

const int registered = [] {
  using benchmark::RegisterBenchmark;
  for (const DType t : kTypes) {
    const std::string name(name_of(t));
    RegisterBenchmark(("cast/f32_to_" + name).c_str(), cast, DType::f32, t);
    RegisterBenchmark(("cast/" + name + "_to_f32").c_str(), cast, t, DType::f32);
    RegisterBenchmark(("cast_stochastic/f32_to_" + name).c_str(), round_stochastically, t);
  }
  for (const int bits : {8, 4}) RegisterBenchmark(("quantise/int" + std::to_string(bits)).c_str(), quantise, bits);
  RegisterBenchmark("top_k/1_percent", select, 100);
  for (const DType t : {DType::f32, DType::bf16, DType::f16}) {
    const std::string name(name_of(t));
    RegisterBenchmark(("linear/canonical/" + name).c_str(), linear, t, true, false);
    RegisterBenchmark(("linear/fast_blocks/" + name).c_str(), linear, t, false, false);
  }
  RegisterBenchmark("linear/fast_library/bf16", linear, DType::bf16, false, true);
  return 0;
}();

}  // namespace
}  // namespace shardlab
