// Activations, residual, positions, rotary positions, dropout, sums of two, fill, casts.
#include "kernels/rope.h"
#include "tests/cuda_kernels/support.h"
#include "tests/namespaces.h"

namespace shardlab::testing::of_elementwise {
namespace {

/// n elements, and by how many arrays are off their alignment.
struct Extent {
  int64_t n;
  int shift = 0;
};
const Extent kExtents[] = {{1}, {7}, {264}, {2051}, {777, 1}};

double gelu(double u) { return 0.5 * u * (1 + std::tanh(0.7978845608028654 * (u + 0.044715 * u * u * u))); }
double silu(double g) { return g / (1 + std::exp(-g)); }
Doubles activation64(const Doubles& u, bool swiglu) {
  Doubles a;
  if (swiglu)
    for (size_t i = 0; i < u.size(); i += 2) a.push_back(silu(u[i]) * u[i + 1]);
  else
    for (const double x : u) a.push_back(gelu(x));
  return a;
}
/// Elementwise, so that one step at a time suffices.
Doubles activation_gradient64(const Doubles& u, const Floats& da, bool swiglu) {
  constexpr double kStep = 1e-6;
  Doubles du;
  for (size_t i = 0; i < u.size(); ++i) {
    const size_t first = swiglu ? i / 2 * 2 : i, count = swiglu ? 2 : 1;
    Doubles up(u.begin() + static_cast<int64_t>(first), u.begin() + static_cast<int64_t>(first + count)), down = up;
    up[i - first] += kStep;
    down[i - first] -= kStep;
    du.push_back(da[swiglu ? i / 2 : i] * (activation64(up, swiglu)[0] - activation64(down, swiglu)[0]) / (2 * kStep));
  }
  return du;
}

}  // namespace

TEST_CASE("activation: F and I equal fp64, in place too") {
  for (const DType t : kActivationTypes)
    for (const bool swiglu : {false, true})
      for (const Extent& e : kExtents) {
        INFO(name_of(t) << " swiglu " << swiglu << " n " << e.n);
        const int64_t width = swiglu ? 2 * e.n : e.n;
        const Floats u = as_stored(random_floats(width, 1, 6.0f), t), da = as_stored(random_floats(e.n, 2), t);
        const Floats a = in_both_orders([&] {
          const Array in(u, t, e.shift), out(Array::poison(e.n), t);
          const Array& to = swiglu ? out : in;
          table().activation_forward({in.in(), to.out(), e.n, swiglu}, stream());
          return to.read();
        });
        REQUIRE(difference(a, activation64(wide(u), swiglu), tolerance(t)) == "");
        const Floats du = in_both_orders([&] {
          const Array in(u, t, e.shift), d(da, t), out(Array::poison(width), t);
          const Array& to = swiglu ? in : out;
          table().activation_input({d.in(), in.in(), to.out(), e.n, swiglu}, stream());
          return to.read();
        });
        REQUIRE(difference(du, activation_gradient64(wide(u), da, swiglu), tolerance(t)) == "");
      }
}

TEST_CASE("activation: far from 0 there is no overflow") {
  const Floats u{-1e30f, -100.0f, 100.0f, 1e4f, -1e4f, 2.0f};
  for (const bool swiglu : {false, true}) {
    const Array in(u, DType::f32), d(Floats(6, 1.0f), DType::f32), out(Array::poison(6), DType::f32);
    const int64_t n = swiglu ? 3 : 6;
    table().activation_forward({in.in(), out.out(), n, swiglu}, stream());
    for (const float x : part_of(out.read(), swiglu ? 0 : 1, n)) REQUIRE(std::isfinite(x));
    table().activation_input({d.in(), in.in(), out.out(), n, swiglu}, stream());
    for (const float x : part_of(out.read(), swiglu ? 2 : 1, 2 * 3)) REQUIRE(std::isfinite(x));
  }
}

TEST_CASE("residual and positions: sums with one rounding, in place too") {
  for (const DType t : kActivationTypes)
    for (const int shift : {0, 1}) {
      const int64_t sequences = 3, tokens = 5, width = 24, rows = sequences * tokens, n = rows * width;
      const Floats x = as_stored(random_floats(n, 1), t), z = as_stored(random_floats(n, 2), t), bias = random_floats(width, 3);
      const Floats positions = random_floats(tokens * width, 4);
      Floats with, without, moved;
      for (int64_t i = 0; i < n; ++i) {
        with.push_back(as_stored(x[i] + (z[i] + bias[i % width]), t));
        without.push_back(as_stored(x[i] + z[i], t));
        moved.push_back(as_stored(x[i] + positions[i % (tokens * width)], t));
      }
      const auto residual = [&](bool biased) {
        const Array a(x, t, shift), b(z, t), c(bias, DType::f32);
        const Array& y = biased ? a : b;
        table().residual_forward({a.in(), b.in(), biased ? c.in() : gpu::Input{}, y.out(), rows, width}, stream());
        return y.read();
      };
      REQUIRE(bit_difference(in_both_orders([&] { return residual(true); }), with) == "");
      REQUIRE(bit_difference(in_both_orders([&] { return residual(false); }), without) == "");
      REQUIRE(bit_difference(in_both_orders([&] {
                               const Array a(x, t, shift), p(positions, DType::f32);
                               table().positions_forward({a.in(), p.in(), a.out(), sequences, tokens, width}, stream());
                               return a.read();
                             }),
                             moved) == "");
    }
}

TEST_CASE("positions: W is the tree over sequences, bit by bit the CPU's, and accumulates") {
  for (const int64_t sequences : {1, 2, 5}) {
    const int64_t tokens = 3, width = 10, n = tokens * width;
    const Floats dx = random_floats(sequences * n, 1), old = random_floats(n, 2);
    for (const bool accumulate : {false, true}) {
      Floats want = accumulate ? old : poisoned(n);
      kernels::kernels_for_this_processor().positions_weight({dx.data(), want.data(), sequences, tokens, width, accumulate});
      REQUIRE(bit_difference(in_both_orders([&] {
                               const Array d(dx, DType::f32), to(accumulate ? old : Array::poison(n), DType::f32);
                               table().positions_weight({d.in(), to.out(), sequences, tokens, width, accumulate}, stream());
                               return to.read();
                             }),
                             want) == "");
    }
  }
}

TEST_CASE("rope: rotates queries and keys and back, and leaves values alone") {
  for (const DType t : kActivationTypes)
    for (const int head_dim : {2, 6, 16, 64}) {
      const int64_t sequences = 2, tokens = 3;
      const int heads = 4, kv_heads = 2, half = head_dim / 2;
      const int64_t width = int64_t{heads + 2 * kv_heads} * head_dim, n = sequences * tokens * width;
      const Floats qkv = as_stored(random_floats(n, 1), t);
      Floats angles(static_cast<size_t>(tokens * head_dim));
      kernels::rope_table(7, tokens, head_dim, 10000.0f, angles.data());
      const Array angles_there(angles, DType::f32);
      const auto rotated = [&](const Floats& from, bool backward) {
        const Array to(from, t);
        table().rope({to.out(), sequences, tokens, heads, kv_heads, head_dim, backward, angles_there.floats()}, stream());
        return to.read();
      };
      Doubles want = wide(qkv);
      for (int64_t row = 0; row < sequences * tokens; ++row)
        for (int head = 0; head < heads + 2 * kv_heads; ++head) {
          if (head % 4 == 3) continue;  // two query heads, a key, a value
          for (int i = 0; i < half; ++i) {
            const double angle = (7.0 + static_cast<double>(row % tokens)) * std::pow(10000.0, -2.0 * i / head_dim);
            double &a = want[static_cast<size_t>(row * width + head * head_dim + i)], &b = *(&a + half);
            const double x = a * std::cos(angle) - b * std::sin(angle);
            b = b * std::cos(angle) + a * std::sin(angle);
            a = x;
          }
        }
      const Floats there = in_both_orders([&] { return rotated(qkv, false); });
      REQUIRE(difference(there, want, tolerance(t)) == "");
      REQUIRE(difference(in_both_orders([&] { return rotated(there, true); }), wide(qkv), 2 * tolerance(t)) == "");
    }
}

TEST_CASE("dropout: the CPU's mask and bits, on any part of the logical tensor") {
  for (const int64_t width : {1, 6, 24, 40})
    for (const float p : {0.0f, 0.25f, 0.9f}) {
      const int64_t sequences = 2, tokens = 5, n = sequences * tokens * width;
      const Floats z = random_floats(n, 1);
      const RandomKey key{.seed = 123, .use = RandomUse::kDropout, .tensor = 9, .step = 4};
      Floats want = z;
      kernels::Dropout cpu{want.data(), sequences, tokens, width, 3, 2, 11, 5, 100, p, key};
      kernels::kernels_for_this_processor().dropout(cpu);
      for (const DType t : kActivationTypes) {
        const Floats got = in_both_orders([&] {
          const Array to(z, t);
          table().dropout({to.out(), sequences, tokens, width, 3, 2, 11, 5, 100, p, key}, stream());
          return to.read();
        });
        if (t == DType::f32) REQUIRE(bit_difference(got, want) == "");
        for (size_t i = 0; i < got.size(); ++i) REQUIRE((got[i] == 0) == (want[i] == 0));
      }
    }
}

TEST_CASE("add, fill and cast in every type") {
  for (const Extent& e : kExtents) {
    const Floats x = random_floats(e.n, 1, 100.0f), y = random_floats(e.n, 2, 100.0f);
    for (const DType t : kActivationTypes) {
      Floats sum;
      const Floats sx = as_stored(x, t), sy = as_stored(y, t);
      for (size_t i = 0; i < sx.size(); ++i) sum.push_back(as_stored(sx[i] + sy[i], t));
      REQUIRE(bit_difference(in_both_orders([&] {
                               const Array a(x, t, e.shift), b(y, t);
                               table().add({a.in(), b.in(), a.out(), e.n}, stream());
                               return a.read();
                             }),
                             sum) == "");
      REQUIRE(bit_difference(in_both_orders([&] {
                               const Array a(Array::poison(e.n), t, e.shift);
                               table().fill({a.out(), e.n, 0.1f}, stream());
                               return a.read();
                             }),
                             Floats(static_cast<size_t>(e.n), as_stored(0.1f, t))) == "");
      for (const DType to : kActivationTypes)
        REQUIRE(bit_difference(in_both_orders([&] {
                                 const Array a(x, t, e.shift), b(Array::poison(e.n), to);
                                 table().cast({a.in(), b.out(), e.n}, stream());
                                 return b.read();
                               }),
                               as_stored(sx, to)) == "");
    }
  }
  const Numbers<double> a({1.5, 2.5, -1e300}), b({1e-20, 4, 1e300}), c({0, 0, 0});
  table().add({{a.data(), DType::f64}, {b.data(), DType::f64}, {c.data(), DType::f64}, 3}, stream());
  REQUIRE(c.read() == std::vector<double>{1.5, 6.5, 0});
}

TEST_CASE("rope, positions and their gradient of packed documents: the CPU's bits, on a part of each sequence") {
  const int64_t sequences = 2, tokens = 3, stride = 8, rows = 5, width = 12;
  const std::vector<int32_t> positions{9, 0, 1, 2, 0, 1, 2, 3, /* the second */ 9, 0, 1, 0, 1, 2, 3, 4};
  const Numbers<int32_t> there(positions);
  const kernels::Kernels& cpu = kernels::kernels_for_this_processor();
  const int64_t n = sequences * tokens * width;
  const Floats x = random_floats(n, 1), learned = random_floats(rows * width, 2);

  Floats angles(static_cast<size_t>(rows * 4));
  kernels::rope_table(0, rows, 4, 10000.0f, angles.data());
  const Array angles_there(angles, DType::f32);
  for (const bool backward : {false, true}) {
    Floats want = x;  // one head, one kv head of 4
    cpu.rope({.qkv = want.data(),
              .sequences = sequences,
              .tokens = tokens,
              .heads = 1,
              .kv_heads = 1,
              .head_dim = 4,
              .backward = backward,
              .table = angles.data(),
              .positions = positions.data() + 1,
              .positions_stride = stride});
    REQUIRE(bit_difference(in_both_orders([&] {
                             const Array to(x, DType::f32);
                             table().rope({.qkv = to.out(),
                                           .sequences = sequences,
                                           .tokens = tokens,
                                           .heads = 1,
                                           .kv_heads = 1,
                                           .head_dim = 4,
                                           .backward = backward,
                                           .table = angles_there.floats(),
                                           .positions = there.data() + 1,
                                           .positions_stride = stride,
                                           .table_rows = rows},
                                          stream());
                             return to.read();
                           }),
                           want) == "");
  }

  Floats want;
  std::vector<int32_t> ids;
  for (int64_t b = 0; b < sequences; ++b)
    for (int64_t t = 0; t < tokens; ++t) {
      ids.push_back(positions[static_cast<size_t>(b * stride + 1 + t)]);
      for (int64_t c = 0; c < width; ++c)
        want.push_back(x[static_cast<size_t>((b * tokens + t) * width + c)] + learned[static_cast<size_t>(ids.back() * width + c)]);
    }
  REQUIRE(bit_difference(in_both_orders([&] {
                           const Array to(x, DType::f32), rows_there(learned, DType::f32);
                           table().positions_forward(
                               {to.in(), rows_there.in(), to.out(), sequences, tokens, width, there.data() + 1, stride, rows},
                               stream());
                           return to.read();
                         }),
                         want) == "");

  Floats sum = poisoned(rows * width);
  kernels::EmbedWeight args{ids.data(), x.data(), sum.data(), sequences, tokens, width, 0, rows};
  Scratch scratch(embed_scratch_bytes(args));
  args.scratch = scratch.data();
  cpu.embed_weight(args);
  REQUIRE(bit_difference(in_both_orders([&] {
                           const Array d(x, DType::f32), to(Array::poison(rows * width), DType::f32);
                           table().embed_weight({.ids = there.data() + 1,
                                                 .dx = d.in(),
                                                 .dtable = to.out(),
                                                 .sequences = sequences,
                                                 .tokens = tokens,
                                                 .width = width,
                                                 .table_rows = rows,
                                                 .ids_stride = stride},
                                                stream());
                           return to.read();
                         }),
                         sum) == "");
}

}  // namespace shardlab::testing::of_elementwise
