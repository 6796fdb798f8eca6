// Kernels that plans ask for by name: the bits of the CPU's (kernels/quantise.h, compress.h, one_bit_adam.h, loss_scale.h), but for
// sums in fp64 whose order is the GPU's own.
#include <algorithm>
#include <array>

#include "kernels/compress.h"
#include "kernels/loss_scale.h"
#include "kernels/one_bit_adam.h"
#include "kernels/outer_step.h"
#include "kernels/quantise.h"
#include "tests/cuda_kernels/support.h"
#include "tests/namespaces.h"

namespace shardlab::testing::of_named {
namespace {

/// Runs one of the CPU's kernels on narrow storage with the scratch that it wants.
template <class Args>
void on_cpu(void (*kernel)(const kernels::MixedKernels&, const Args&, kernels::Scratch&), const Args& args) {
  const kernels::MixedKernels mixed(kernels::kernels_for_this_processor());
  auto counter = kernels::Scratch::counter();
  kernel(mixed, args, counter);
  Scratch space(counter.used());
  kernels::Scratch lent(space.data());
  kernel(mixed, args, lent);
  REQUIRE(space.intact());
}

/// What `x` becomes in storage of type t, as bytes of the host.
std::vector<unsigned char> stored_bytes(const Floats& x, DType t) {
  std::vector<unsigned char> bytes(static_cast<size_t>(bytes_of(t, static_cast<int64_t>(x.size()))));
  kernels::storage_kernels(kernels::kernels_for_this_processor())
      .narrow({x.data(), static_cast<int64_t>(x.size()), t, bytes.data()});
  return bytes;
}

/// The values behind them.
Floats values_of(const std::vector<unsigned char>& bytes, DType t, int64_t n) {
  Floats x(static_cast<size_t>(n));
  kernels::storage_kernels(kernels::kernels_for_this_processor()).widen({bytes.data(), t, n, x.data()});
  return x;
}

template <class Compute>
void in_each_order(const Compute& compute) {
  for (const bool reversed : {false, true}) {
    device().reverse(reversed);
    compute();
  }
  device().reverse(false);
}

/// Bit for bit, but that one NaN is as good as another.
bool same(const Floats& a, const Floats& b) {
  return std::ranges::equal(
      a, b, [](float x, float y) { return (std::isnan(x) && std::isnan(y)) || std::memcmp(&x, &y, sizeof x) == 0; });
}

struct Blocks {
  int64_t rows, columns, blocks;
};
constexpr std::array kBlocks{Blocks{1, 1, 1}, Blocks{3, 600, 3}, Blocks{2, 37, 5}, Blocks{5, 256, 1}, Blocks{1, 5000, 2}};

}  // namespace

TEST_CASE("codes of 8 and 4 bits with block scales are the CPU's bits, and so is what comes back of them and of their sum") {
  for (const DType t : kActivationTypes)
    for (const int bits : {8, 4})
      for (const Blocks& b : kBlocks) {
        INFO(name_of(t) << " " << bits << " bits, " << b.rows << " x " << b.columns << " in " << b.blocks);
        Floats x = random_floats(b.rows * b.columns, 1, 3);
        x.back() = std::numeric_limits<float>::infinity();
        if (b.rows > 2) std::fill_n(x.begin(), b.columns, 0.0f);
        if (b.rows > 1) x[static_cast<size_t>(b.columns)] = NAN;
        std::vector<unsigned char> bytes = stored_bytes(x, t);
        const kernels::BlockShape shape{b.rows, b.columns, b.blocks, bits};
        std::vector<unsigned char> codes(static_cast<size_t>(b.rows * shape.row_bytes()));
        Floats scales(static_cast<size_t>(b.rows * b.blocks));
        on_cpu<kernels::BlockQuantise>(kernels::block_quantise, {shape, {bytes.data(), t, {}}, codes.data(), scales.data()});
        const gpu::BlockShape there{b.rows, b.columns, b.blocks, bits};
        const Array input(x, t);
        in_each_order([&] {
          const Numbers<unsigned char> got(std::vector<unsigned char>(codes.size(), 0x5a));
          const Numbers<float> got_scales(poisoned(b.rows * b.blocks));
          table().quantise({there, input.in(), got.data(), got_scales.data()}, stream());
          REQUIRE(same(got_scales.read(), scales));
          REQUIRE(got.read() == codes);
          // Back, each in the type of the input; and the tree over rows.
          std::vector<unsigned char> back(bytes.size());
          on_cpu<kernels::BlockDequantise>(kernels::block_dequantise, {shape, codes.data(), scales.data(), {back.data(), t, {}}});
          const Array result(Array::poison(b.rows * b.columns), t);
          table().dequantise({there, got.data(), got_scales.data(), result.out()}, stream());
          const Floats want = values_of(back, t, b.rows * b.columns), read = result.read();
          for (size_t i = 0; i < want.size(); ++i) REQUIRE((std::isnan(want[i]) ? std::isnan(read[i]) : want[i] == read[i]));
        });
      }
}

TEST_CASE("sums over rows, of codes and of values, are the CPU's tree") {
  for (const DType t : kActivationTypes)
    for (const Blocks& b : kBlocks) {
      const Floats x = random_floats(b.rows * b.columns, 2, 3);
      const Array input(x, t);
      for (const int bits : {8, 4, 1}) {
        INFO(name_of(t) << " " << bits << " bits, " << b.rows << " x " << b.columns << " in " << b.blocks);
        const gpu::BlockShape shape{b.rows, b.columns, b.blocks, bits};
        const Numbers<unsigned char> codes(std::vector<unsigned char>(static_cast<size_t>(b.rows * shape.row_bytes())));
        const Numbers<float> scales(poisoned(b.rows * b.blocks));
        table().quantise({shape, input.in(), codes.data(), scales.data()}, stream());
        const std::vector<unsigned char> held = codes.read();
        const Floats by = scales.read();
        Floats want(static_cast<size_t>(b.columns));
        const kernels::Stored y{want.data(), DType::f32, {}};
        if (bits == 1)
          on_cpu<kernels::SignExpandSum>(kernels::sign_expand_sum, {{b.rows, b.columns, b.blocks}, held.data(), by.data(), y});
        else
          on_cpu<kernels::BlockDequantiseSum>(kernels::block_dequantise_sum,
                                              {{b.rows, b.columns, b.blocks, bits}, held.data(), by.data(), y});
        REQUIRE(same(in_both_orders([&] {
                       const Array sum(Array::poison(b.columns), DType::f32);
                       table().dequantise_sum({shape, codes.data(), scales.data(), sum.out()}, stream());
                       return sum.read();
                     }),
                     want));
      }
      std::vector<unsigned char> bytes = stored_bytes(x, t), want(static_cast<size_t>(bytes_of(t, b.columns)));
      on_cpu<kernels::SumRows>(kernels::sum_rows, {{bytes.data(), t, {}}, {want.data(), t, {}}, b.rows, b.columns});
      REQUIRE(same(in_both_orders([&] {
                     const Array sum(Array::poison(b.columns), t);
                     table().sum_rows({input.in(), sum.out(), b.rows, b.columns}, stream());
                     return sum.read();
                   }),
                   values_of(want, t, b.columns)));
    }
}

TEST_CASE("signs: the CPU's bits, scales by the mean size") {
  for (const DType t : kActivationTypes)
    for (const Blocks& b : kBlocks) {
      Floats x = random_floats(b.rows * b.columns, 3, 3);
      x.back() = -0.0f;
      const std::vector<unsigned char> bytes = stored_bytes(x, t);
      const kernels::SignShape shape{b.rows, b.columns, b.blocks};
      std::vector<uint8_t> signs(static_cast<size_t>(b.rows * shape.row_bytes()));
      Floats scales(static_cast<size_t>(b.rows * b.blocks));
      std::vector<unsigned char> copy = bytes;
      on_cpu<kernels::SignCompress>(kernels::sign_compress, {shape, {copy.data(), t, {}}, signs.data(), scales.data()});
      const Array input(x, t);
      in_each_order([&] {
        const Numbers<uint8_t> got(std::vector<uint8_t>(signs.size(), 0x5a));
        const Numbers<float> got_scales(poisoned(b.rows * b.blocks));
        table().quantise({{b.rows, b.columns, b.blocks, 1}, input.in(), got.data(), got_scales.data()}, stream());
        REQUIRE(got.read() == signs);
        const Floats read = got_scales.read();
        for (size_t i = 0; i < read.size(); ++i) REQUIRE(std::abs(read[i] - scales[i]) <= 1e-7f * scales[i]);
      });
    }
}

TEST_CASE("swap_leading: elements of any size in the other order") {
  for (const int64_t bytes : {1, 3, 4, 64}) {
    std::vector<unsigned char> x(static_cast<size_t>(3 * 5 * bytes)), want(x.size());
    for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<unsigned char>(i * 7);
    for (int64_t r = 0; r < 3; ++r)
      for (int64_t c = 0; c < 5; ++c)
        std::copy_n(&x[static_cast<size_t>((r * 5 + c) * bytes)], bytes, &want[static_cast<size_t>((c * 3 + r) * bytes)]);
    const Numbers<unsigned char> from(x), to(std::vector<unsigned char>(x.size()));
    table().swap_leading({from.data(), to.data(), 3, 5, bytes}, stream());
    REQUIRE(to.read() == want);
  }
}

TEST_CASE("selections: the CPU's elements in the CPU's order, by size and by chance, ties to the smaller index") {
  for (const DType t : kActivationTypes)
    for (const auto& [n, k] : {std::pair<int64_t, int64_t>{1, 1}, {1000, 10}, {9000, 1}, {20000, 700}, {300, 300}, {50, 0}})
      for (const bool by_chance : {false, true}) {
        INFO(name_of(t) << " " << k << " of " << n << (by_chance ? " by chance" : ""));
        Floats x = random_floats(n, 4, 3);
        for (size_t i = 0; i < x.size(); i += 7) x[i] = i % 2 == 0 ? 2.5f : -2.5f;  // ties
        std::vector<unsigned char> bytes = stored_bytes(x, t);
        Floats values = poisoned(k);
        std::vector<int32_t> indices(static_cast<size_t>(k), -1);
        const RandomKey key{5, RandomUse::kShuffle, 9, 3};
        if (by_chance)
          on_cpu<kernels::RandomK>(kernels::random_k, {{bytes.data(), t, {}}, n, k, key, 0, values.data(), indices.data()});
        else
          on_cpu<kernels::TopK>(kernels::top_k, {{bytes.data(), t, {}}, n, k, values.data(), indices.data()});
        const Array input(x, t);
        in_each_order([&] {
          const Numbers<float> got(poisoned(k));
          const Numbers<int32_t> at(std::vector<int32_t>(static_cast<size_t>(k), -1));
          gpu::Select a{
              .x = input.in(), .n = n, .k = k, .by_chance = by_chance, .key = key, .values = got.data(), .indices = at.data()};
          const Lent scratch(gpu::scratch_bytes(a));
          a.scratch = scratch;
          table().select(a, stream());
          REQUIRE(at.read() == indices);
          REQUIRE(same(got.read(), values));
        });
      }
}

TEST_CASE("scatter: the tree over parts, the CPU's bits; zero_selected leaves the rest") {
  constexpr int64_t n = 777, k = 50;
  for (const int64_t parts : {1, 2, 3, 8}) {
    const Floats values = random_floats(parts * k, 5);
    std::vector<int32_t> indices;
    for (int64_t p = 0; p < parts; ++p)
      for (int64_t i = 0; i < k; ++i) indices.push_back(static_cast<int32_t>((p % 2) + i * 15 + i % 3));
    for (const DType t : kActivationTypes) {
      std::vector<unsigned char> want(static_cast<size_t>(bytes_of(t, n)));
      on_cpu<kernels::Scatter>(kernels::scatter, {parts, k, n, values.data(), indices.data(), {want.data(), t, {}}});
      const Numbers<float> v(values);
      const Numbers<int32_t> at(indices);
      REQUIRE(same(in_both_orders([&] {
                     const Array y(Array::poison(n), t);
                     table().scatter({parts, k, n, v.data(), at.data(), y.out()}, stream());
                     return y.read();
                   }),
                   values_of(want, t, n)));
    }
  }
  Floats x = random_floats(n, 6);
  const std::vector<int32_t> chosen{0, 3, 776};
  const Numbers<float> from(x), to(poisoned(n));
  const Numbers<int32_t> at(chosen);
  table().zero_selected({from.data(), to.data(), n, at.data(), 3}, stream());
  for (const int32_t i : chosen) x[static_cast<size_t>(i)] = 0;
  REQUIRE(same(to.read(), x));
}

TEST_CASE("orthogonalise: the CPU's basis within rounding, of columns that others span too") {
  for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{64, 4}, {300, 3}, {5, 5}, {3, 4}, {1, 1}}) {
    Floats p = random_floats(rows * columns, 7);
    if (columns > 2 && rows > 5)
      for (int64_t r = 0; r < rows; ++r) p[static_cast<size_t>(r * columns + 2)] = 2 * p[static_cast<size_t>(r * columns)];
    Floats want(p.size());
    auto counter = kernels::Scratch::counter();
    kernels::orthogonalise({rows, columns, p.data(), want.data()}, counter);
    Scratch space(counter.used());
    kernels::Scratch lent(space.data());
    kernels::orthogonalise({rows, columns, p.data(), want.data()}, lent);
    const Floats got = in_both_orders([&] {
      const Numbers<float> in(p), out(poisoned(rows * columns));
      gpu::Orthogonalise a{rows, columns, in.data(), out.data(), {}};
      const Lent scratch(gpu::scratch_bytes(a));
      a.scratch = scratch;
      table().orthogonalise(a, stream());
      return out.read();
    });
    REQUIRE(difference(got, wide(want), 1e-6) == "");
  }
  const Numbers<float> basis(Floats(12)), old(Floats(12, 0.5f));
  table().start_basis({basis.data(), 3, 4}, stream());
  REQUIRE(basis.read() == Floats{1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0});
  table().start_basis({old.data(), 3, 4}, stream());
  REQUIRE(old.read() == Floats(12, 0.5f));
}

TEST_CASE("moments: folded, frozen and moved as on the CPU") {
  constexpr int64_t n = 1030;
  const Floats gradient = random_floats(n, 8), m = random_floats(n, 9), start = random_floats(n, 11);
  Floats v = random_floats(n, 10);
  for (float& x : v) x = x < 0 ? 0 : x * 1e-3f;  // some have no variance
  const Numbers<float> g(gradient), first(m), second(v), begin(start);
  const Numbers<float> beta(Floats{0.9f}), correction(Floats{0.3f}), epsilon(Floats{1e-8f}), bias(poisoned(1));
  Floats want = poisoned(n), m_want = m;
  std::array pieces{kernels::MomentPiece{m_want.data(), v.data(), n}};
  kernels::fold_momentum({gradient.data(), want.data(), n, pieces, 0.9f, 0.25f});
  const Numbers<float> momentum(poisoned(n));
  table().fold_momentum({g.data(), momentum.data(), first.data(), n, beta.data(), 0.25f}, stream());
  REQUIRE(same(momentum.read(), want));

  kernels::frozen_adam({want.data(), n, pieces, 0.9f, 0.3f, 1e-8f, 6});
  gpu::Numbers bias_of{.rule = gpu::Numbers::Rule::kBiasCorrection, .count = 1, .step = 6};
  bias_of.in[0] = beta.data();
  bias_of.out[0] = bias.data();
  table().numbers(bias_of, stream());
  table().frozen_adam({momentum.data(), first.data(), second.data(), n, bias.data(), correction.data(), epsilon.data()}, stream());
  REQUIRE(same(momentum.read(), want));
  REQUIRE(same(first.read(), m_want));

  const Numbers<float> share(Floats{0.5f}), rate(Floats{0.7f}), friction(Floats{0.9f});
  for (const bool moves : {false, true}) {
    Floats velocity = m, value = gradient;
    kernels::outer_step({.delta = gradient.data(),
                         .start = start.data(),
                         .velocity = moves ? velocity.data() : nullptr,
                         .value = value.data(),
                         .n = n,
                         .share = 0.5f,
                         .learning_rate = 0.7f,
                         .momentum = 0.9f});
    const Numbers<float> there(m), out(gradient);
    table().outer_step(
        {out.data(), begin.data(), moves ? there.data() : nullptr, out.data(), n, share.data(), rate.data(), friction.data()},
        stream());
    REQUIRE(same(out.read(), value));
    REQUIRE(same(there.read(), velocity));
  }
}

TEST_CASE("one pass: products by a number, differences and sums of several types") {
  constexpr int64_t n = 1037;
  const Floats a = random_floats(n, 12), b = random_floats(n, 13);
  const Numbers<float> factor(Floats{0.37f});
  for (const DType from : kActivationTypes)
    for (const DType to : kActivationTypes)
      for (const int shift : {0, 1}) {
        INFO(name_of(from) << " to " << name_of(to));
        const Array x(a, from, shift), y(b, to, shift), product(Array::poison(n), to, shift), error(Array::poison(n), from, shift),
            sum(Array::poison(n), DType::f32, shift);
        table().multiply({x.in(), factor.data(), product.out(), n}, stream());
        table().subtract({x.in(), y.in(), error.out(), n, 0.25f}, stream());
        table().add({x.in(), y.in(), sum.out(), n}, stream());
        const Floats xs = as_stored(a, from), ys = as_stored(b, to), products = product.read(), errors = error.read(),
                     sums = sum.read();
        for (size_t i = 0; i < xs.size(); ++i) {
          REQUIRE(products[i] == as_stored(xs[i] * 0.37f, to));
          REQUIRE(errors[i] == as_stored(xs[i] - 0.25f * ys[i], from));
          REQUIRE(sums[i] == xs[i] + ys[i]);
        }
      }
}

TEST_CASE("the largest size of many arrays, whether it is none, and which array is the first that has one") {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  struct Wrong {
    size_t part;
    float value;
  };
  for (const int count : {1, 3, 150})
    for (const std::vector<Wrong>& wrongs :
         {std::vector<Wrong>{}, {{0, NAN}}, {{2, -kInf}, {1, kInf}}, {{140, kInf}, {149, NAN}}}) {
      if (std::ranges::any_of(wrongs, [&](const Wrong& w) { return w.part >= static_cast<size_t>(count); })) continue;
      std::vector<Floats> values;
      for (int p = 0; p < count; ++p) values.push_back(random_floats(p % 3 == 0 ? 9000 : 5, static_cast<uint32_t>(20 + p)));
      values[0][4] = -3;
      size_t first = SIZE_MAX;
      bool none = false;
      for (const Wrong& w : wrongs) {
        values[w.part][3] = w.value;
        first = std::min(first, w.part);
        none = none || std::isnan(w.value);
      }
      std::vector<std::unique_ptr<Array>> arrays;
      std::vector<gpu::Input> parts;
      std::vector<int64_t> sizes;
      for (size_t p = 0; p < values.size(); ++p) {
        arrays.push_back(std::make_unique<Array>(values[p], kActivationTypes[p % 3], static_cast<int>(p % 2)));
        parts.push_back(arrays.back()->in());
        sizes.push_back(static_cast<int64_t>(values[p].size()));
      }
      in_each_order([&] {
        const Numbers<float> amax(poisoned(1));
        const Numbers<int32_t> bad(std::vector<int32_t>{9}), where(std::vector<int32_t>{9});
        gpu::Amax a{parts.data(), sizes.data(), count, amax.data(), bad.data(), where.data(), {}};
        const Lent scratch(gpu::scratch_bytes(a));
        a.scratch = scratch;
        table().amax(a, stream());
        const float most = amax.read()[0];
        REQUIRE((none ? std::isnan(most) : most == (wrongs.empty() ? 3 : kInf)));
        REQUIRE(bad.read()[0] == (wrongs.empty() ? 0 : 1));
        REQUIRE(where.read()[0] == (wrongs.empty() ? 0 : static_cast<int32_t>(first) + 1));
      });
    }
}

TEST_CASE("rules on numbers are the CPU's") {
  using Rule = gpu::Numbers::Rule;
  const auto run = [](Rule rule, const std::vector<const void*>& in, const std::vector<void*>& out, bool of_norm = false) {
    gpu::Numbers a{.rule = rule, .count = static_cast<int>(in.size()), .wide = of_norm};
    std::ranges::copy(in, a.in.begin());
    std::ranges::copy(out, a.out.begin());
    table().numbers(a, stream());
  };
  for (const double norm : {0.0, 1e-3, 1.0, 4.0, 1e30, std::numeric_limits<double>::infinity(), std::nan("")})
    for (const float most : {0.5f, 1.0f, 3.0f}) {
      const Numbers<double> squared(std::vector<double>{norm});
      const Numbers<float> bound(Floats{most}), factor(poisoned(1));
      run(Rule::kClipFactor, {squared.data(), bound.data()}, {factor.data()});
      const float want = kernels::clip_factor(norm, most), got = factor.read()[0];
      REQUIRE((std::isnan(want) ? std::isnan(got) : got == want));
    }
  for (const float x : {1.0f, std::nextafter(1.0f, 0.0f), 0.0f, -1.0f, std::numeric_limits<float>::infinity(), std::nanf("")}) {
    const Numbers<float> factor(Floats{x});
    const Numbers<int32_t> differs(std::vector<int32_t>{9});
    run(Rule::kNotOne, {factor.data()}, {differs.data()});
    REQUIRE(differs.read()[0] == (x == 1.0f ? 0 : 1));
  }
  for (const bool bad : {false, true})
    for (const float scale : {1.0f, 1024.0f, 16777216.0f})
      for (const int32_t good : {0, 4}) {
        const Numbers<int32_t> flag(std::vector<int32_t>{bad}), count(std::vector<int32_t>{good});
        const Numbers<float> value(Floats{scale}), interval(Floats{5});
        run(Rule::kAdjustScale, {flag.data(), interval.data()}, {value.data(), count.data()});
        kernels::LossScaleRule rule;
        rule.interval = 5;
        const auto want = kernels::next_loss_scale(rule, {scale, good}, bad);
        REQUIRE(value.read()[0] == want.scale);
        REQUIRE(count.read()[0] == want.good_steps);
      }
  const Numbers<int32_t> zero(std::vector<int32_t>{0}), three(std::vector<int32_t>{3}), flag(std::vector<int32_t>{9}),
      seen(std::vector<int32_t>{4});
  run(Rule::kAny, {zero.data(), three.data()}, {flag.data()});
  REQUIRE(flag.read()[0] == 1);
  run(Rule::kNot, {flag.data()}, {flag.data()});
  REQUIRE(flag.read()[0] == 0);
  run(Rule::kCount, {}, {flag.data()});
  REQUIRE(flag.read()[0] == 1);
  const Numbers<float> scale(Floats{0}), start(Floats{64}), factor(poisoned(1));
  for (int i = 0; i < 2; ++i) run(Rule::kStartScale, {start.data()}, {scale.data()});
  REQUIRE(scale.read()[0] == 64);
  run(Rule::kUnscaleFactor, {scale.data()}, {factor.data()});
  REQUIRE(factor.read()[0] == 1.0f / 64);
  const Numbers<double> squared(std::vector<double>{4096 * 9.0}), plain(std::vector<double>{-1});
  run(Rule::kUnscaleNorm, {squared.data(), factor.data()}, {plain.data()});
  REQUIRE(plain.read()[0] == 9);
  // A norm of 3 against a mean of 1.25 remembered of four steps.
  const Numbers<float> mean(Floats{1.25f}), twice(Floats{2}), thrice(Floats{3}), four(Floats{4}), five(Floats{5});
  run(Rule::kJudgeSpike, {plain.data(), mean.data(), seen.data(), twice.data(), four.data()}, {flag.data()}, true);
  REQUIRE(flag.read()[0] == 1);
  run(Rule::kJudgeSpike, {plain.data(), mean.data(), seen.data(), thrice.data(), four.data()}, {flag.data()}, true);
  REQUIRE(flag.read()[0] == 0);
  run(Rule::kJudgeSpike, {plain.data(), mean.data(), seen.data(), twice.data(), five.data()}, {flag.data()}, true);
  REQUIRE(flag.read()[0] == 0);
  run(Rule::kRunningMean, {plain.data(), five.data()}, {mean.data(), seen.data()}, true);
  REQUIRE(seen.read()[0] == 5);
  REQUIRE(mean.read()[0] == 1.25f + (3.0f - 1.25f) / 5);
  run(Rule::kRunningMean, {four.data(), five.data()}, {mean.data(), seen.data()});
  REQUIRE(seen.read()[0] == 5);
}

}  // namespace shardlab::testing::of_named
