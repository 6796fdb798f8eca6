// Mixtures of experts on narrow storage: every op is round(fp32 kernel(widened operands)), bit for bit (kernels/mixed.h).
#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "kernels/experts.h"
#include "kernels/fp8.h"
#include "tests/kernels_lowp/packed.h"
#include "tests/namespaces.h"

namespace shardlab::testing {
namespace {

using Ids = std::vector<int32_t>;
using kernels::MixedKernels;

constexpr std::array<DType, 3> kStorage{DType::bf16, DType::f16, DType::f32};

void for_storage(const std::function<void(DType, const kernels::Kernels&)>& body) {
  for (const DType type : kStorage)
    for (const kernels::Kernels* k : variants_here()) {
      INFO(name_of(type) << ", " << k->name);
      body(type, *k);
    }
}

constexpr int64_t kTokens = 9, kTopK = 3, kExperts = 6;

/// Choices as routers leave them: in no order where experts have places, and ~expert where there was no room. A token has no row at all.
Ids choices() {
  Ids choice;
  for (int64_t t = 0; t < kTokens; ++t)
    for (int64_t j = 0; j < kTopK; ++j) {
      const auto expert = static_cast<int32_t>((5 * t + 4 * j + t / 4) % kExperts);
      choice.push_back(t == 4 || (t + 2 * j) % 5 == 0 ? ~expert : expert);
    }
  return choice;
}
int64_t rows_of(const Ids& choice) {
  return std::ranges::count_if(choice, [](int32_t c) { return c >= 0; });
}

}  // namespace

TEST_CASE("mixed: rows of experts are taken apart and summed, with rows that were dropped and experts out of order") {
  const Ids choice = choices();
  const int64_t rows = rows_of(choice);
  REQUIRE((rows > kTokens && rows < kTokens * kTopK));
  for_storage([&](DType type, const kernels::Kernels& k) {
    for (const int64_t width : {5, 300, 4100}) {
      Scratch lent(kernels::places_scratch_bytes(kTokens, kTopK, kExperts));
      Packed x = random_packed(type, kTokens * width, 1), sorted(type, rows * width), dx(type, kTokens * width), y = dx;
      kernels::Dispatch dispatch{
          .choice = choice.data(), .tokens = kTokens, .top_k = kTopK, .experts = kExperts, .width = width, .scratch = lent.data()};
      const Floats xs = x.values(), weights = random_floats(kTokens * kTopK, 2);
      Floats want_rows = poisoned(rows * width), want = poisoned(kTokens * width);
      dispatch.from = xs.data(), dispatch.to = want_rows.data();
      kernels::dispatch(dispatch);
      run_mixed<kernels::MixedDispatch>(k, &MixedKernels::dispatch,
                                        {.from = x.stored(), .to = sorted.stored(), .dispatch = dispatch});
      REQUIRE(bit_difference(sorted.values(), want_rows) == "");

      Packed drows = random_packed(type, rows * width, 3);
      const Floats drows_values = drows.values();
      dispatch.from = drows_values.data(), dispatch.to = want.data(), dispatch.back = true;
      kernels::dispatch(dispatch);
      run_mixed<kernels::MixedDispatch>(k, &MixedKernels::dispatch,
                                        {.from = drows.stored(), .to = dx.stored(), .dispatch = dispatch});
      REQUIRE(bit_difference(dx.values(), dx.rounded(want)) == "");

      kernels::CombineForward combine{.rows = drows_values.data(),
                                      .weights = weights.data(),
                                      .choice = choice.data(),
                                      .y = want.data(),
                                      .tokens = kTokens,
                                      .top_k = kTopK,
                                      .experts = kExperts,
                                      .width = width,
                                      .scratch = lent.data()};
      kernels::combine_forward(combine);
      run_mixed<kernels::MixedCombineForward>(k, &MixedKernels::combine_forward,
                                              {.rows = drows.stored(), .y = y.stored(), .combine = combine});
      REQUIRE(bit_difference(y.values(), y.rounded(want)) == "");

      Floats want_weights = poisoned(kTokens * kTopK), dweights = want_weights;
      kernels::CombineInput back{.dy = xs.data(),
                                 .rows = drows_values.data(),
                                 .weights = weights.data(),
                                 .choice = choice.data(),
                                 .drows = want_rows.data(),
                                 .dweights = want_weights.data(),
                                 .tokens = kTokens,
                                 .top_k = kTopK,
                                 .experts = kExperts,
                                 .width = width,
                                 .scratch = lent.data()};
      kernels::combine_input(back);
      back.dweights = dweights.data();
      run_mixed<kernels::MixedCombineInput>(k, &MixedKernels::combine_input,
                                            {.dy = x.stored(), .rows = drows.stored(), .drows = sorted.stored(), .combine = back});
      REQUIRE(bit_difference(sorted.values(), sorted.rounded(want_rows)) == "");
      REQUIRE(bit_difference(dweights, want_weights) == "");
    }
  });
}

TEST_CASE("mixed: the gate of shared experts") {
  for_storage([](DType type, const kernels::Kernels& k) {
    for (const int64_t width : {5, 300, 4100}) {
      const int64_t n = kTokens * width;
      Packed x = random_packed(type, n, 1), dy = random_packed(type, n, 2), gate = random_packed(type, kTokens, 3), y(type, n),
             dx = y, dgate(type, kTokens);
      const Floats xs = x.values(), dys = dy.values(), gates = gate.values();
      Floats want = poisoned(n), want_gate = poisoned(kTokens);
      kernels::gate_forward(k, {xs.data(), gates.data(), want.data(), kTokens, width});
      run_mixed<kernels::MixedGateForward>(k, &MixedKernels::gate_forward, {x.stored(), gate.stored(), y.stored(), kTokens, width});
      REQUIRE(bit_difference(y.values(), y.rounded(want)) == "");
      kernels::gate_input(k, {dys.data(), xs.data(), gates.data(), want.data(), want_gate.data(), kTokens, width});
      run_mixed<kernels::MixedGateInput>(k, &MixedKernels::gate_input,
                                         {dy.stored(), x.stored(), gate.stored(), dx.stored(), dgate.stored(), kTokens, width});
      REQUIRE(bit_difference(dx.values(), dx.rounded(want)) == "");
      REQUIRE(bit_difference(dgate.values(), dgate.rounded(want_gate)) == "");
    }
  });
}

namespace {

/// Rows of two sources, in two parts of the tokens each; expert 1 has none, expert 3 none of the second source, and the buffer is not full.
struct Grouped {
  Ids counts{2, 0, 40, 3, 1, 0, 95, 0, 5, 0, 1, 0, 2, 0, 30, 0};
  int64_t used = 179, capacity = 190;
  kernels::RowCounts rows() const { return {counts.data(), 4, 4, 2, capacity}; }
};

/// The first `used` rows of `width`: what lies behind is nobody's.
Floats counted(const Floats& x, int64_t used, int64_t width) { return {x.begin(), x.begin() + used * width}; }

double largest(const Floats& x) {
  return std::abs(*std::ranges::max_element(x, {}, [](float v) { return std::abs(v); }));
}
double most_apart(const Floats& a, const Floats& b) {
  double most = 0;
  for (size_t i = 0; i < a.size(); ++i) most = std::max(most, std::abs(double{a[i]} - double{b[i]}));
  return most;
}

}  // namespace

TEST_CASE("mixed: products with the weights of experts, and activations of their rows") {
  const Grouped g;
  REQUIRE(std::accumulate(g.counts.begin(), g.counts.end(), int64_t{0}) == g.used);
  for_storage([&](DType type, const kernels::Kernels& k) {
    for (const auto& [in, out] : {std::pair<int64_t, int64_t>{19, 7}, {131, 150}})
      for (const bool canonical : {true, false}) {
        INFO(in << " to " << out << (canonical ? ", canonical" : ", fast"));
        Packed x = random_packed(type, g.capacity * in, 1), w = random_packed(type, 4 * in * out, 2, 0.1f),
               dy = random_packed(type, g.capacity * out, 3), y(type, g.capacity * out), dx(type, g.capacity * in);
        const Floats xs = x.values(), ws = w.values(), dys = dy.values();
        const auto check = [&](const Packed& have, const Floats& want, int64_t width) {
          const Floats a = counted(have.values(), g.used, width), b = counted(have.rounded(want), g.used, width);
          if (canonical)
            REQUIRE(bit_difference(a, b) == "");
          else  // another block is another order of sums
            REQUIRE(most_apart(a, b) <= 0.01 * largest(b));
          const Floats all = have.values();
          REQUIRE(std::isnan(all[static_cast<size_t>(g.used * width)]));
          REQUIRE(std::isnan(all.back()));
        };
        kernels::GroupedLinear product{
            .rows = g.rows(), .x = xs.data(), .w = ws.data(), .in = in, .out = out, .canonical = canonical};
        Floats want = poisoned(g.capacity * out), want_dx = poisoned(g.capacity * in);
        product.y = want.data();
        Scratch lent(kernels::grouped_scratch_bytes(product));
        product.scratch = lent.data();
        kernels::grouped_linear(k, product);
        run_mixed<kernels::MixedGroupedLinear>(k, &MixedKernels::grouped_linear, {x.stored(), w.stored(), y.stored(), product});
        check(y, want, out);

        product.x = dys.data(), product.y = want_dx.data(), product.back = true;
        Scratch lent_back(kernels::grouped_scratch_bytes(product));
        product.scratch = lent_back.data();
        kernels::grouped_linear(k, product);
        run_mixed<kernels::MixedGroupedLinear>(k, &MixedKernels::grouped_linear, {dy.stored(), w.stored(), dx.stored(), product});
        check(dx, want_dx, in);

        for (const DType gradient : {type, DType::f32})
          for (const bool accumulate : {false, true}) {
            if (accumulate && canonical) continue;
            Packed dw = random_packed(gradient, 4 * in * out, 4);
            Floats want_dw = dw.values();
            kernels::GroupedLinearWeight weight{.rows = g.rows(),
                                                .x = xs.data(),
                                                .dy = dys.data(),
                                                .dw = want_dw.data(),
                                                .in = in,
                                                .out = out,
                                                .accumulate = accumulate,
                                                .canonical = canonical};
            Scratch lent_weight(kernels::grouped_scratch_bytes(weight));
            weight.scratch = lent_weight.data();
            kernels::grouped_linear_weight(k, weight);
            run_mixed<kernels::MixedGroupedLinearWeight>(k, &MixedKernels::grouped_linear_weight,
                                                         {x.stored(), dy.stored(), dw.stored(), weight});
            const Floats rounded = dw.rounded(want_dw);
            if (canonical)
              REQUIRE(bit_difference(dw.values(), rounded) == "");
            else
              REQUIRE(most_apart(dw.values(), rounded) <= 0.01 * largest(rounded));
          }

        if (!canonical) continue;  // an activation has no order
        for (const bool swiglu : {false, true}) {
          const int64_t u_width = swiglu ? 2 * in : in;
          Packed u = random_packed(type, g.capacity * u_width, 5), da = random_packed(type, g.capacity * in, 6),
                 a(type, g.capacity * in), du(type, g.capacity * u_width);
          const Floats us = u.values(), das = da.values();
          Floats want_a = poisoned(g.capacity * in), want_du = poisoned(g.capacity * u_width);
          kernels::GroupedActivation activation{
              .rows = g.rows(), .u = us.data(), .to = want_a.data(), .width = in, .swiglu = swiglu};
          activation.rows.sources = 1;
          kernels::grouped_activation(k, activation);
          kernels::MixedGroupedActivation mixed{
              .u = u.stored(), .to = a.stored(), .rows = activation.rows, .width = in, .swiglu = swiglu};
          run_mixed<kernels::MixedGroupedActivation>(k, &MixedKernels::grouped_activation, mixed);
          check(a, want_a, in);
          activation.da = das.data(), activation.to = want_du.data();
          kernels::grouped_activation(k, activation);
          mixed.da = da.stored(), mixed.to = du.stored();
          run_mixed<kernels::MixedGroupedActivation>(k, &MixedKernels::grouped_activation, mixed);
          check(du, want_du, u_width);
        }
      }
  });
}

TEST_CASE("mixed: products of experts take factors with scales of blocks, and no block has elements of two experts") {
  const Grouped g;
  constexpr int64_t kIn = 131, kOut = 150, kMatrices = 4;
  for (const kernels::Kernels* k : variants_here())
    for (const bool canonical : {true, false}) {
      INFO(k->name << (canonical ? ", canonical" : ", fast"));
      const auto quantised = [&](const Floats& values, const kernels::Fp8Blocks& blocks, int64_t matrices) {
        Packed x(DType::f32, static_cast<int64_t>(values.size())), q(DType::f8e4m3, static_cast<int64_t>(values.size()));
        std::ranges::copy(values, static_cast<float*>(x.stored().data));
        Floats scales = poisoned(matrices * blocks.down() * blocks.across());
        run_counted([&](const auto& a, kernels::Scratch& s) { fp8_find_scales(MixedKernels(*k), a, s); },
                    kernels::Fp8FindScales{x.stored(), blocks, DType::f8e4m3, scales.data(), matrices});
        run_counted([&](const auto& a, kernels::Scratch& s) { fp8_quantise(MixedKernels(*k), a, s); },
                    kernels::Fp8Quantise{x.stored(), q.stored(), blocks, scales.data(), matrices});
        return std::pair(std::move(q), std::move(scales));
      };
      const auto value = [](const Packed& q, const Floats& scales, const kernels::Fp8Blocks& b) {
        Floats values = q.values();
        for (size_t i = 0; i < values.size(); ++i) {
          const auto matrix = static_cast<int64_t>(i) / (b.rows * b.columns), at = static_cast<int64_t>(i) % (b.rows * b.columns);
          const int64_t block = at / b.columns / b.block_rows * b.across() + at % b.columns / b.block_columns;
          values[i] *= scales[static_cast<size_t>(matrix * b.down() * b.across() + block)];
        }
        return values;
      };
      // Experts of different sizes: a block of two would have the scale of the larger.
      Floats weights = random_floats(kMatrices * kOut * kIn, 2);
      for (size_t i = 0; i < weights.size(); ++i) weights[i] *= std::ldexp(1.0f, static_cast<int>(i / (kOut * kIn)) * 4);
      const auto w_blocks = kernels::fp8_squares(kOut, kIn), x_blocks = kernels::fp8_rows(g.capacity, kIn),
                 dy_blocks = kernels::fp8_rows(g.capacity, kOut);
      auto [w, w_scales] = quantised(weights, w_blocks, kMatrices);
      for (int64_t e = 0; e < kMatrices; ++e) {
        const Floats one(weights.begin() + e * kOut * kIn, weights.begin() + (e + 1) * kOut * kIn);
        const auto [alone, scales] = quantised(one, w_blocks, 1);
        REQUIRE(std::equal(scales.begin(), scales.end(), w_scales.begin() + e * static_cast<int64_t>(scales.size())));
        const Floats have = w.values(), want = alone.values();
        REQUIRE(std::equal(want.begin(), want.end(), have.begin() + e * kOut * kIn));
      }
      auto [x, x_scales] = quantised(random_floats(g.capacity * kIn, 1), x_blocks, 1);
      auto [dy, dy_scales] = quantised(random_floats(g.capacity * kOut, 3), dy_blocks, 1);
      const Floats xs = value(x, x_scales, x_blocks), ws = value(w, w_scales, w_blocks), dys = value(dy, dy_scales, dy_blocks);
      const auto operand = [](Packed& q, const kernels::Fp8Blocks& blocks, const Floats& scales) {
        return fp8_operand(q.stored().data, DType::f8e4m3, blocks, scales.data());
      };
      const auto check = [&](const Packed& have, const Floats& want, int64_t width) {
        const Floats a = counted(have.values(), g.used, width), b = counted(have.rounded(want), g.used, width);
        if (canonical)
          REQUIRE(bit_difference(a, b) == "");
        else
          REQUIRE(most_apart(a, b) <= 0.01 * largest(b));
      };
      for (const bool back : {false, true}) {
        Packed y(DType::bf16, g.capacity * (back ? kIn : kOut));
        Floats want = poisoned(g.capacity * (back ? kIn : kOut));
        kernels::GroupedLinear product{.rows = g.rows(),
                                       .x = (back ? dys : xs).data(),
                                       .w = ws.data(),
                                       .y = want.data(),
                                       .in = kIn,
                                       .out = kOut,
                                       .back = back,
                                       .canonical = canonical};
        Scratch lent(kernels::grouped_scratch_bytes(product));
        product.scratch = lent.data();
        kernels::grouped_linear(*k, product);
        run_mixed<kernels::MixedGroupedLinear>(*k, &MixedKernels::grouped_linear,
                                               {back ? operand(dy, dy_blocks, dy_scales) : operand(x, x_blocks, x_scales),
                                                operand(w, w_blocks, w_scales), y.stored(), product});
        check(y, want, back ? kIn : kOut);
      }
      Packed dw(DType::f32, kMatrices * kOut * kIn);
      Floats want = poisoned(kMatrices * kOut * kIn);
      kernels::GroupedLinearWeight product{
          .rows = g.rows(), .x = xs.data(), .dy = dys.data(), .dw = want.data(), .in = kIn, .out = kOut, .canonical = canonical};
      Scratch lent(kernels::grouped_scratch_bytes(product));
      product.scratch = lent.data();
      kernels::grouped_linear_weight(*k, product);
      run_mixed<kernels::MixedGroupedLinearWeight>(
          *k, &MixedKernels::grouped_linear_weight,
          {operand(x, x_blocks, x_scales), operand(dy, dy_blocks, dy_scales), dw.stored(), product});
      if (canonical)
        REQUIRE(bit_difference(dw.values(), want) == "");
      else
        REQUIRE(most_apart(dw.values(), want) <= 0.01 * largest(want));
    }
}

}  // namespace shardlab::testing
