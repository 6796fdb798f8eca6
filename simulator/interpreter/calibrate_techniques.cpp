#include "simulator/interpreter/calibrate_techniques.h"

#include <fmt/format.h>

#include "plan/named_kernels.h"
#include "simulator/interpreter/bench.h"

namespace shardlab::simulator {
namespace {

/// Operands of up to 1 Mi elements, ten times as many in a pool.
constexpr PoolSizes kPools{14 << 20, 7 << 20, 7 << 20};

Bench bench(std::string_view what, int ranks, DType dtype) {
  return Bench(fmt::format("calibration {} {} x{}", what, name_of(dtype), ranks), "rank", ranks, kPools, dtype);
}

Type of(DType dtype, std::initializer_list<int64_t> extents) {
  Type type = tensor(extents);
  type.dtype = dtype;
  return type;
}

// --- experts -------------------------------------------------------------------------------------------------------------

constexpr int64_t kTopK = 2;

/// What the router of some tokens chose: operands of everything behind it.
struct Routed {
  int64_t tokens, experts;
  BufferId weights, choice, counts;

  int64_t rows() const { return tokens * kTopK; }
};

Type by_choice(const Bench& b, int64_t tokens, DType dtype) {
  const int64_t length = b.sequence_tokens(tokens);
  return of(dtype, {tokens / length, length, kTopK});
}

Routed add_router(Bench& b, int64_t tokens, int64_t experts) {
  const int64_t length = b.sequence_tokens(tokens);
  const Type scores = tensor({tokens / length, length, experts});
  const BufferId logits = b.drawn(scores), dweights = b.drawn(by_choice(b, tokens, DType::f32));
  const Routed r{tokens, experts, b.state(by_choice(b, tokens, DType::f32)), b.state(by_choice(b, tokens, DType::i32)),
                 b.state(of(DType::i32, {1, 1, experts}))};
  Route route;
  route.phase = Phase::kF;
  route.normalise = true;
  route.tokens = tokens;
  b.op(route, {logits}, {{r.weights}, {r.choice}, {r.counts}});
  route.phase = Phase::kI;
  b.op(route, {dweights, logits, r.choice}, {{b.state(scores)}});
  b.op(ChooseExperts{}, {logits}, {{b.state(by_choice(b, tokens, DType::i32))}});
  b.op(ExpertLoad{true}, {r.choice, b.state(tensor({experts}))}, {{{}, 1}});
  return r;
}

/// Rows to the experts and back, and gates, of tokens of `width`.
void add_rows(Bench& b, const Routed& r, int64_t width) {
  const Type x = b.rows(r.tokens, width), rows = b.typed(tensor({1, r.rows(), width})), gate = b.rows(r.tokens, 1);
  const int experts = static_cast<int>(r.experts);
  b.op(Dispatch{Phase::kF, experts}, {b.warm(x), r.choice}, {{b.result(rows)}});
  b.op(Dispatch{Phase::kI, experts}, {b.warm(rows), r.choice}, {{b.passing(x)}});
  b.op(Combine{Phase::kF, experts}, {b.warm(rows), r.weights, r.choice}, {{b.result(x)}});
  b.op(Combine{Phase::kI, experts}, {b.warm(x), b.cold(rows), r.weights, r.choice},
       {{b.passing(rows)}, {b.state(by_choice(b, r.tokens, DType::f32))}});
  b.op(Gate{Phase::kF}, {b.warm(x), b.warm(gate)}, {{b.result(x)}});
  b.op(Gate{Phase::kI}, {b.warm(x), b.cold(x), b.cold(gate)}, {{b.passing(x)}, {b.passing(gate)}});
}

void add_products(Bench& b, const Routed& r, int64_t out, int64_t in) {
  const Type x = b.typed(tensor({1, r.rows(), in})), y = b.typed(tensor({1, r.rows(), out}));
  const Type w = b.typed(tensor({r.experts, out, in}));
  b.op(GroupedLinear{Phase::kF, 1, r.rows()}, {b.warm(x), b.cold(w), r.counts}, {{b.result(y)}});
  b.op(GroupedLinear{Phase::kI, 1, r.rows()}, {b.warm(y), b.cold(w), r.counts}, {{b.passing(x)}});
  b.op(GroupedLinear{Phase::kW, 1, r.rows()}, {b.cold(x), b.warm(y), r.counts}, {{b.side_result(tensor({r.experts, out, in}))}});
}

// --- codes ---------------------------------------------------------------------------------------------------------------

/// Elements that share a scale.
constexpr int64_t kBlock = 256;

/// Codes of so many bits of `n` elements, and the sum of the codes of two ranks.
void add_codes(Bench& b, int64_t n, std::string_view name, DType type, int64_t elements_in_one) {
  const Type x = tensor({1, n}), scales = tensor({1, n / kBlock}), codes = of(type, {1, n / elements_in_one});
  const BufferId coded = b.state(codes), scaled = b.state(scales);
  const bool signs = name == "sign";
  b.op(named(signs ? "sign_compress" : fmt::format("quantise_{}", name)), {b.cold(x)}, {{coded}, {scaled}});
  b.op(named(signs ? "sign_expand" : fmt::format("dequantise_{}", name)), {coded, scaled}, {{b.result(x)}});
  const BufferId two = b.state(of(type, {2, n / elements_in_one})), two_scales = b.state(tensor({2, n / kBlock}));
  b.op(named(signs ? "sign_expand_sum" : fmt::format("dequantise_sum_{}", name)), {two, two_scales}, {{b.result(tensor({n}))}});
}

void add_selection(Bench& b, int64_t n) {
  const int64_t k = n / 128;
  const Type x = tensor({n});
  for (const std::string_view name : {"top_k", "random_k"}) {
    const BufferId values = b.state(tensor({k})), indices = b.state(of(DType::i32, {k}));
    b.op(named(name), {b.cold(x)}, {{values}, {indices}});
    if (name != "top_k") continue;
    b.op(named("zero_selected"), {b.cold(x), indices}, {{b.result(x)}});
    b.op(named("scatter"), {values, indices}, {{b.result(x)}});
  }
}

/// PowerSGD of a square matrix of `n` elements, of rank four.
void add_projection(Bench& b, int64_t n) {
  int64_t side = 1;
  while (side * side < n) side *= 2;
  const Type m = tensor({side, side}), p = tensor({side, 4}), q = tensor({4, side});
  const BufferId projected = b.state(p);
  b.op(named("project"), {b.cold(m), b.drawn(q)}, {{projected}});
  b.op(named("orthogonalise"), {projected}, {{b.state(p)}});
  b.op(named("start_basis"), {b.state(q)}, {{{}, 0}});
  b.op(named("subtract_share"), {b.cold(m), b.cold(m)}, {{b.result(m)}});
}

/// Adam by one bit, and the other optimizers of what was sent.
void add_steps(Bench& b, int64_t n) {
  const Type x = tensor({n}), one = tensor({1});
  b.op(named("fold_momentum"), {b.cold(x), b.drawn(one), b.cold(x)}, {{{}, 0}});
  const BufferId momentum = b.state(x);
  b.op(named("frozen_adam"), {b.cold(x), b.drawn(one), b.drawn(one), b.drawn(one), b.cold(x)}, {{{}, 0}, {momentum}});
  b.op(named("outer_step"), {b.cold(x), b.cold(x), b.drawn(one), b.drawn(one)}, {{b.result(x)}});
}

void add_elements(Bench& b, int64_t n) {
  const Type x = tensor({n}), half = of(DType::bf16, {n}), parts = of(DType::bf16, {2, n / 2});
  const BufferId narrow = b.state(half);
  b.op(named("add"), {b.cold(x), b.warm(x)}, {{b.result(x)}});
  b.op(named("subtract"), {b.cold(x), b.warm(x)}, {{b.result(x)}});
  b.op(named("multiply"), {b.warm(x), b.drawn(tensor({1}))}, {{b.result(x)}});
  b.op(named("copy"), {b.cold(x)}, {{narrow}});
  b.op(named("copy"), {narrow}, {{b.result(x)}});
  b.op(Copy{}, {b.cold(x)}, {{narrow}});
  b.op(Copy{}, {narrow}, {{b.result(x)}});
  b.op(named("sum_rows"), {b.state(parts)}, {{b.result(tensor({n / 2}))}});
  b.op(named("found_inf"), {b.cold(x)}, {{b.state(of(DType::i32, {1}))}});
  b.op(named("swap_leading"), {b.cold(tensor({2, 2, n / 4}))}, {{b.result(tensor({2, 2, n / 4}))}});
}

}  // namespace

Plan experts_plan(int ranks, DType dtype) {
  Bench b = bench("experts", ranks, dtype);
  for (const int64_t experts : {2, 8})
    for (const int64_t tokens : {16, 64, 256, 1024}) {  // of which each expert has 16, 64 or 256 rows, where products are measured
      const Routed r = add_router(b, tokens, experts);
      if (const int64_t rows = r.rows() / experts; rows < 16 || rows > 256) continue;
      for (const int64_t in : {64, 256, 512}) {
        add_rows(b, r, in);
        for (const int64_t out : {64, 256, 512}) add_products(b, r, out, in);
      }
    }
  return b.take();
}

Plan heads_plan(int ranks, DType dtype) {
  Bench b = bench("heads", ranks, dtype);
  constexpr int kHeadDim = 32, kNope = 24, kRotated = 8;
  for (const int64_t tokens : {64, 256, 1024})
    for (const int64_t width : {64, 256}) {
      const int heads = static_cast<int>(width / kHeadDim);
      const Type qkv = b.rows(tokens, 3 * width), q = b.rows(tokens, width), kv = b.rows(tokens, 2 * width);
      b.op(SplitHeads{Phase::kF, heads, heads, kHeadDim}, {b.warm(qkv)}, {{b.result(q)}, {b.result(kv)}});
      b.op(SplitHeads{Phase::kI, heads, heads, kHeadDim}, {b.warm(q), b.warm(kv)}, {{b.passing(qkv)}});

      const int64_t length = b.sequence_tokens(tokens);
      const Type parts = b.typed(tensor({2, length, tokens / length, 3 * width / 2}));
      b.op(Regroup{false, 2}, {b.warm(qkv)}, {{b.passing(parts)}});
      b.op(Regroup{true, 2}, {b.warm(parts)}, {{b.result(qkv)}});

      const Type gamma = b.typed(tensor({kHeadDim})), dgamma = tensor({kHeadDim});
      Type stats = b.rows(tokens, 2 * heads);
      stats.dtype = DType::f32;
      b.op(HeadNorm{Phase::kF, heads, heads, kHeadDim}, {b.warm(qkv), b.cold(gamma), b.cold(gamma)},
           {{b.result(qkv)}, {b.side_result(stats)}});
      const BufferId saved = b.cold(qkv), saved_stats = b.side_operand(stats), dy = b.warm(qkv);
      b.op(HeadNorm{Phase::kW, heads, heads, kHeadDim}, {dy, saved, saved_stats},
           {{b.side_result(dgamma)}, {b.side_result(dgamma)}});
      b.op(HeadNorm{Phase::kI, heads, heads, kHeadDim}, {dy, saved, b.cold(gamma), b.cold(gamma), saved_stats}, {{b.passing(qkv)}});

      const Type latent = b.rows(tokens, heads * (kNope + kHeadDim)), rotated = b.rows(tokens, kRotated);
      const LatentHeads forward{Phase::kF, heads, kNope, kRotated, kHeadDim}, backward{Phase::kI, heads, kNope, kRotated, kHeadDim};
      b.op(forward, {b.warm(q), b.warm(latent), b.warm(rotated)}, {{b.result(qkv)}});
      b.op(backward, {b.warm(qkv)}, {{b.passing(q)}, {b.passing(latent)}, {b.passing(rotated)}});
    }
  return b.take();
}

Plan codes_plan(int ranks) {
  Bench b = bench("codes", ranks, DType::f32);
  for (const int64_t elements : {4096, 65536, 1 << 20}) {
    add_elements(b, elements);
    add_codes(b, elements, "int8", DType::i8, 1);
    add_codes(b, elements, "int4", DType::u8, 2);
    add_codes(b, elements, "sign", DType::u8, 8);
    add_selection(b, elements);
    add_projection(b, elements);
    add_steps(b, elements);
  }
  return b.take();
}

Plan float8_plan(int ranks) {
  Bench b = bench("float8", ranks, DType::bf16);
  constexpr int64_t kWidth = 256, kSquare = 128;
  for (const int64_t rows : {128, 512, 2048}) {
    const Type x = b.typed(tensor({1, rows, kWidth})), w = b.typed(tensor({rows, kWidth}));
    const Type codes = of(DType::f8e4m3, {1, rows, kWidth}), squares = of(DType::f8e4m3, {rows, kWidth});
    b.op(named("amax"), {b.warm(x)}, {{b.state(tensor({1}))}});
    b.op(named("fp8_quantise"), {b.warm(x), b.drawn(tensor({1}))}, {{b.state(codes)}});
    b.op(named("fp8_quantise_1x128"), {b.warm(x)}, {{b.state(codes)}, {b.state(tensor({1, rows, kWidth / kSquare}))}});
    b.op(named("fp8_quantise_128x128"), {b.cold(w)}, {{b.state(squares)}, {b.state(tensor({rows / kSquare, kWidth / kSquare}))}});
  }
  return b.take();
}

}  // namespace shardlab::simulator
