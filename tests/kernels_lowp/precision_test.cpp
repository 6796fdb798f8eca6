// fp8 scaling, loss scaling and clipping.
#include "kernels/fp8.h"
#include "kernels/loss_scale.h"
#include "kernels/quantise.h"
#include "tests/kernels_lowp/packed.h"
#include "tests/namespaces.h"

namespace shardlab::testing {
namespace {

using kernels::MixedKernels;

constexpr DType kFp8[]{DType::f8e4m3, DType::f8e5m2};

/// Largest size of the elements of block (r, c).
double block_amax(const Floats& x, const kernels::Fp8Blocks& b, int64_t down, int64_t across) {
  double most = 0;
  for (int64_t r = down * b.block_rows; r < std::min(b.rows, (down + 1) * b.block_rows); ++r)
    for (int64_t c = across * b.block_columns; c < std::min(b.columns, (across + 1) * b.block_columns); ++c)
      most = std::max(most, std::abs(double{x[static_cast<size_t>(r * b.columns + c)]}));
  return most;
}

}  // namespace

TEST_CASE("fp8: a scale is the least power of two that brings the largest value into range") {
  for (const DType t : kFp8) {
    const double largest = kernels::largest_value(t);
    for (const float amax : {1.0f, 447.0f, 448.0f, 449.0f, 57344.0f, 57345.0f, 3e-5f, 1e20f, 0x1.fffffep127f}) {
      const float s = kernels::fp8_scale(amax, t);
      int exponent = 0;
      REQUIRE(std::frexp(s, &exponent) == 0.5f);
      REQUIRE(double{amax} / double{s} <= largest);
      REQUIRE(double{amax} / (double{s} / 2) > largest);
    }
    REQUIRE(kernels::fp8_scale(0.0f, t) == 1);
    REQUIRE(kernels::fp8_scale(1e-45f, t) == 0x1p-126f);  // its reciprocal must be finite
    REQUIRE(std::isnan(kernels::fp8_scale(INFINITY, t)));
    REQUIRE(std::isnan(kernels::fp8_scale(NAN, t)));
  }
}

TEST_CASE("fp8: delayed scaling takes the largest of its history, which moves on a step at a time") {
  Floats history(3);
  const auto step = [&](float amax) { return kernels::fp8_delayed_scale({history.data(), 3, amax, DType::f8e4m3}); };
  REQUIRE(step(448) == 1);
  REQUIRE(step(7) == 1);
  REQUIRE(history == Floats{7, 448, 0});
  REQUIRE(step(3) == 1);
  REQUIRE(step(3.5f) == 0x1p-6f);  // 448 has left; 7 = 448 * 2^-6 is the largest
  REQUIRE(step(INFINITY) == 0x1p-7f);
  REQUIRE(history == Floats{0, 3.5f, 3});
}

TEST_CASE("fp8: quantised blocks by block and element, in every kind of block") {
  for (const DType t : kFp8)
    for (const DType from : {DType::f32, DType::bf16}) {
      const int64_t rows = 131, columns = 300;
      for (const auto& blocks :
           {kernels::fp8_tensor(rows, columns), kernels::fp8_rows(rows, columns), kernels::fp8_squares(rows, columns)}) {
        Floats values = random_floats(rows * columns, 1);
        for (size_t i = 0; i < values.size(); ++i) values[i] *= std::ldexp(1.0f, static_cast<int>(i / 5000) - 4);  // blocks differ
        Packed x(from, values), q(t, rows * columns), back(DType::f32, rows * columns);
        const Floats xs = x.values();
        Floats scales = poisoned(blocks.down() * blocks.across());
        const MixedKernels k(kernels::kernels_for_this_processor());
        run_counted([&](const auto& a, kernels::Scratch& s) { fp8_find_scales(k, a, s); },
                    kernels::Fp8FindScales{x.stored(), blocks, t, scales.data()});
        for (int64_t r = 0; r < blocks.down(); ++r)
          for (int64_t c = 0; c < blocks.across(); ++c)
            REQUIRE(scales[static_cast<size_t>(r * blocks.across() + c)] ==
                    kernels::fp8_scale(static_cast<float>(block_amax(xs, blocks, r, c)), t));
        run_counted([&](const auto& a, kernels::Scratch& s) { fp8_quantise(k, a, s); },
                    kernels::Fp8Quantise{x.stored(), q.stored(), blocks, scales.data()});
        Floats scale_of(xs.size()), scaled(xs.size()), want = q.values();
        for (int64_t i = 0; i < rows * columns; ++i) {
          const int64_t block = i / columns / blocks.block_rows * blocks.across() + i % columns / blocks.block_columns;
          scaled[static_cast<size_t>(i)] = xs[static_cast<size_t>(i)] / scales[static_cast<size_t>(block)];
          want[static_cast<size_t>(i)] *= scales[static_cast<size_t>(block)];
        }
        REQUIRE(bit_difference(q.values(), q.rounded(scaled)) == "");
        kernels::Stored operand = fp8_operand(q.stored().data, t, blocks, scales.data());
        run_counted([&](const auto& a, kernels::Scratch& s) { sum_rows(k, a, s); },
                    kernels::SumRows{operand, back.stored(), 1, rows * columns});
        REQUIRE(bit_difference(back.values(), want) == "");
      }
    }
}

TEST_CASE("fp8: an infinity or NaN reaches the dequantised block") {
  for (const float bad : {INFINITY, NAN}) {
    Packed x(DType::f32, Floats{1.0f, bad, 2.0f}), q(DType::f8e4m3, 3);
    Floats scale = poisoned(1);
    const MixedKernels k(kernels::kernels_for_this_processor());
    const auto blocks = kernels::fp8_tensor(1, 3);
    run_counted([&](const auto& a, kernels::Scratch& s) { fp8_find_scales(k, a, s); },
                kernels::Fp8FindScales{x.stored(), blocks, DType::f8e4m3, scale.data()});
    run_counted([&](const auto& a, kernels::Scratch& s) { fp8_quantise(k, a, s); },
                kernels::Fp8Quantise{x.stored(), q.stored(), blocks, scale.data()});
    for (const float v : q.values()) REQUIRE(std::isnan(v));
  }
}

TEST_CASE("fp8: the product of quantised operands, whole or over parts of the contraction, is that of their values") {
  // Power-of-two scales: a product of dequantised values is exact in fp32's exponent, so cutting K in two gives the same leaves.
  const int64_t rows = 37, in = 256, out = 130;
  const kernels::Kernels& fp32 = kernels::kernels_for_this_processor();
  const MixedKernels k(fp32);
  Packed x(DType::f32, random_floats(rows * in, 1)), w(DType::f32, random_floats(out * in, 2, 0.05f));
  Packed xq(DType::f8e4m3, rows * in), wq(DType::f8e4m3, out * in), y(DType::bf16, rows * out);
  const auto x_blocks = kernels::fp8_rows(rows, in), w_blocks = kernels::fp8_squares(out, in);
  Floats x_scales = poisoned(x_blocks.down() * x_blocks.across()), w_scales = poisoned(w_blocks.down() * w_blocks.across());
  const auto quantise = [&](Packed& from, Packed& to, const kernels::Fp8Blocks& blocks, Floats& scales) {
    run_counted([&](const auto& a, kernels::Scratch& s) { fp8_find_scales(k, a, s); },
                kernels::Fp8FindScales{from.stored(), blocks, DType::f8e4m3, scales.data()});
    run_counted([&](const auto& a, kernels::Scratch& s) { fp8_quantise(k, a, s); },
                kernels::Fp8Quantise{from.stored(), to.stored(), blocks, scales.data()});
  };
  quantise(x, xq, x_blocks, x_scales);
  quantise(w, wq, w_blocks, w_scales);
  const auto dequantised = [&](Packed& q, const kernels::Fp8Blocks& blocks, const Floats& scales) {
    Packed values(DType::f32, blocks.rows * blocks.columns);
    run_mixed<kernels::MixedCopy>(fp32, &MixedKernels::copy, {q.stored(), values.stored(), blocks.rows * blocks.columns});
    Floats result = values.values();
    for (int64_t i = 0; i < blocks.rows * blocks.columns; ++i)
      result[static_cast<size_t>(i)] *=
          scales[static_cast<size_t>(i / blocks.columns / blocks.block_rows * blocks.across() + i % blocks.columns / 128)];
    return result;
  };
  const Floats xs = dequantised(xq, x_blocks, x_scales), ws = dequantised(wq, w_blocks, w_scales);
  kernels::LinearForward args{.x = xs.data(), .w = ws.data(), .rows = rows, .in = in, .out = out, .canonical = true};
  Scratch scratch(kernels::linear_scratch_bytes(args));
  Floats want = poisoned(rows * out);
  args.y = want.data();
  args.scratch = scratch.data();
  fp32.linear_forward(args);
  run_mixed<kernels::MixedLinearForward>(fp32, &MixedKernels::linear_forward,
                                         {.x = fp8_operand(xq.stored().data, DType::f8e4m3, x_blocks, x_scales.data()),
                                          .w = fp8_operand(wq.stored().data, DType::f8e4m3, w_blocks, w_scales.data()),
                                          .y = y.stored(),
                                          .rows = rows,
                                          .in = in,
                                          .out = out,
                                          .canonical = true});
  REQUIRE(bit_difference(y.values(), y.rounded(want)) == "");
  // And fp8 is close to what it stands for: 2^-4 of relative error an element, averaged out over 256 terms.
  const Doubles exact = [&] {
    Doubles sum(static_cast<size_t>(rows * out));
    const Floats a = x.values(), b = w.values();
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t o = 0; o < out; ++o)
        for (int64_t i = 0; i < in; ++i)
          sum[static_cast<size_t>(r * out + o)] +=
              double{a[static_cast<size_t>(r * in + i)]} * double{b[static_cast<size_t>(o * in + i)]};
    return sum;
  }();
  REQUIRE(difference(want, exact, 0.05) == "");
}

TEST_CASE("loss scale: backs off on an infinity, grows after an interval of good steps, stays in range") {
  const kernels::LossScaleRule rule{.interval = 3};
  kernels::LossScaleState s{1024, 0};
  const auto next = [&](bool bad) { return s = next_loss_scale(rule, s, bad), s.scale; };
  REQUIRE(next(false) == 1024);
  REQUIRE(next(false) == 1024);
  REQUIRE(next(true) == 512);
  REQUIRE(s.good_steps == 0);  // the two good steps before count no more
  REQUIRE(next(false) == 512);
  REQUIRE(next(false) == 512);
  REQUIRE(next(false) == 1024);
  REQUIRE(s.good_steps == 0);
  s = {1, 0};
  REQUIRE(next(true) == 1);
  s = {rule.most, 2};
  REQUIRE(next(false) == rule.most);
}

TEST_CASE("clip factor: norm over bound, never above 1, NaN kept") {
  REQUIRE(kernels::clip_factor(0.25, 1.0f) == 1);
  REQUIRE(kernels::clip_factor(0, 1.0f) == 1);
  REQUIRE(kernels::clip_factor(16, 1.0f) == static_cast<float>(1.0 / (4.0 + 1e-6)));
  REQUIRE(kernels::clip_factor(INFINITY, 1.0f) == 0);
  REQUIRE(std::isnan(kernels::clip_factor(NAN, 1.0f)));
}

TEST_CASE("amax and multiply over narrow storage") {
  for (const DType t : {DType::f32, DType::bf16, DType::f16, DType::f8e5m2}) {
    const int64_t n = 9001;
    Packed x = random_packed(t, n, 1), y(DType::f16, n);
    const Floats xs = x.values();
    float most = 0, got = NAN;
    for (const float v : xs) most = std::max(most, std::abs(v));
    const MixedKernels k(kernels::kernels_for_this_processor());
    run_counted([&](const auto& a, kernels::Scratch& s) { kernels::amax(k, a, s); }, kernels::Amax{x.stored(), n, &got});
    REQUIRE(got == most);
    run_counted([&](const auto& a, kernels::Scratch& s) { multiply(k, a, s); }, kernels::Multiply{x.stored(), y.stored(), n, 0.3f});
    Floats want = xs;
    for (float& v : want) v *= 0.3f;
    REQUIRE(bit_difference(y.values(), y.rounded(want)) == "");
    Floats bad = xs;
    bad[8999] = NAN;
    Packed with_nan(t, bad);
    run_counted([&](const auto& a, kernels::Scratch& s) { kernels::amax(k, a, s); }, kernels::Amax{with_nan.stored(), n, &got});
    REQUIRE(std::isnan(got));
  }
}

}  // namespace shardlab::testing
