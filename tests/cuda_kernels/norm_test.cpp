#include "tests/cuda_kernels/support.h"
#include "tests/namespaces.h"

namespace shardlab::testing::of_norm {
namespace {

constexpr float kEpsilon = 1e-3f;  // large enough to show in the result

struct Shape {
  int64_t sequences, tokens, width;
  int shift = 0;  ///< elements by which arrays are off their alignment
  int64_t rows() const { return sequences * tokens; }
};
// Widths: one element, odd, a warp's row, a block's row, one that a thread holds in part only.
const Shape kShapes[] = {{1, 1, 1}, {1, 3, 7}, {2, 17, 64}, {2, 5, 264}, {1, 3, 1536}, {1, 2, 4099}, {2, 5, 48, 1}, {1, 2, 16416}};

struct Inputs {
  Floats x, gamma, beta, dy, residual;
};
Inputs inputs(const Shape& s, DType t) {
  Inputs in{random_floats(s.rows() * s.width, 1, 2.0f), random_floats(s.width, 2), random_floats(s.width, 3),
            random_floats(s.rows() * s.width, 4), random_floats(s.rows() * s.width, 5)};
  for (float& v : in.x) v += 0.3f;  // a mean that is not 0
  for (Floats* f : {&in.x, &in.dy, &in.residual}) *f = as_stored(*f, t);
  return in;
}

struct Expected {
  Doubles y, stats, dx, dgamma, dbeta;
};
/// In fp64, from the definitions.
Expected expected(const Inputs& in, const Shape& s, bool rms) {
  Expected e;
  e.dgamma.assign(static_cast<size_t>(s.width), 0);
  e.dbeta = e.dgamma;
  const double h = static_cast<double>(s.width);
  for (int64_t r = 0; r < s.rows(); ++r) {
    const float *x = in.x.data() + r * s.width, *dy = in.dy.data() + r * s.width;
    double mean = 0, square = 0, a = 0, c = 0;
    for (int64_t i = 0; i < s.width; ++i) mean += rms ? 0 : x[i] / h;
    for (int64_t i = 0; i < s.width; ++i) square += (x[i] - mean) * (x[i] - mean) / h;
    const double rstd = 1 / std::sqrt(square + static_cast<double>(kEpsilon));
    if (!rms) e.stats.push_back(mean);
    e.stats.push_back(rstd);
    for (int64_t i = 0; i < s.width; ++i) {
      const double xhat = (x[i] - mean) * rstd, g = static_cast<double>(dy[i]) * in.gamma[i];
      e.y.push_back(xhat * in.gamma[i] + (rms ? 0 : in.beta[i]));
      a += rms ? 0 : g / h;
      c += g * xhat / h;
      e.dgamma[i] += dy[i] * xhat;
      e.dbeta[i] += dy[i];
    }
    for (int64_t i = 0; i < s.width; ++i)
      e.dx.push_back((static_cast<double>(dy[i]) * in.gamma[i] - a - (x[i] - mean) * rstd * c) * rstd);
  }
  return e;
}

/// y, then stats.
Floats forward(const Inputs& in, const Shape& s, DType t, DType parameters, bool rms) {
  const Array x(in.x, t, s.shift), gamma(in.gamma, parameters), beta(in.beta, parameters);
  const Array y(Array::poison(s.rows() * s.width), t), stats(Array::poison(s.rows() * (rms ? 1 : 2)), DType::f32);
  table().norm_forward({.x = x.in(),
                        .gamma = gamma.in(),
                        .beta = rms ? gpu::Input{} : beta.in(),
                        .y = y.out(),
                        .stats = stats.floats(),
                        .rows = s.rows(),
                        .width = s.width,
                        .epsilon = kEpsilon,
                        .rms = rms},
                       stream());
  return joined({y.read(), stats.read()});
}
Floats stats_of(const Inputs& in, const Shape& s, DType t, bool rms) {
  const Floats all = forward(in, s, t, DType::f32, rms);
  return part_of(all, s.rows() * s.width, static_cast<int64_t>(all.size()));
}
Floats input_gradient(const Inputs& in, const Shape& s, DType t, bool rms, bool residual, bool in_place) {
  const Array dy(in.dy, t), x(in.x, t, s.shift), gamma(in.gamma, DType::f32), stats(stats_of(in, s, t, rms), DType::f32);
  const Array rest(in.residual, t), fresh(Array::poison(s.rows() * s.width), t);
  const Array& dx = in_place ? (residual ? rest : dy) : fresh;
  table().norm_input({.dy = dy.in(),
                      .x = x.in(),
                      .gamma = gamma.in(),
                      .stats = stats.floats(),
                      .residual = residual ? rest.in() : gpu::Input{},
                      .dx = dx.out(),
                      .rows = s.rows(),
                      .width = s.width,
                      .rms = rms},
                     stream());
  return dx.read();
}
/// dgamma, then dbeta.
Floats weight_gradient(const Inputs& in, const Shape& s, DType t, bool rms, const Floats* old = nullptr) {
  const Array dy(in.dy, t), x(in.x, t, s.shift), stats(stats_of(in, s, t, rms), DType::f32);
  const Array dgamma(old != nullptr ? *old : Array::poison(s.width), DType::f32);
  const Array dbeta(old != nullptr ? *old : Array::poison(s.width), DType::f32);
  gpu::NormWeight a{.dy = dy.in(),
                    .x = x.in(),
                    .stats = stats.floats(),
                    .dgamma = dgamma.out(),
                    .dbeta = rms ? gpu::Output{} : dbeta.out(),
                    .tokens = {s.sequences, s.tokens, {}},
                    .width = s.width,
                    .rms = rms,
                    .accumulate = old != nullptr};
  const Lent scratch(gpu::scratch_bytes(a));
  a.scratch = scratch;
  table().norm_weight(a, stream());
  return rms ? dgamma.read() : joined({dgamma.read(), dbeta.read()});
}

Doubles together(Doubles a, const Doubles& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

}  // namespace

TEST_CASE("norm: F, I and W equal fp64 in every type and alignment") {
  for (const DType t : kActivationTypes)
    for (const bool rms : {false, true})
      for (const Shape& s : kShapes) {
        INFO(name_of(t) << " rms " << rms << " tokens " << s.rows() << " width " << s.width << " shift " << s.shift);
        const Inputs in = inputs(s, t);
        const Expected want = expected(in, s, rms);
        const int64_t n = s.rows() * s.width;
        const Floats y = in_both_orders([&] { return forward(in, s, t, DType::f32, rms); });
        REQUIRE(difference(part_of(y, n, static_cast<int64_t>(y.size())), want.stats, kTolerance) == "");
        if (!rms && s.width == 1) continue;  // xhat is 0
        REQUIRE(difference(part_of(y, 0, n), want.y, tolerance(t)) == "");
        const Floats dx = in_both_orders([&] { return input_gradient(in, s, t, rms, false, false); });
        REQUIRE(difference(dx, want.dx, (s.width == 1 ? 100 : 5) * tolerance(t)) == "");
        const Floats dw = in_both_orders([&] { return weight_gradient(in, s, t, rms); });
        REQUIRE(difference(dw, rms ? want.dgamma : together(want.dgamma, want.dbeta), 4 * kTolerance) == "");
      }
}

TEST_CASE("norm: where arrays lie does not change a bit") {
  for (const DType t : kActivationTypes)
    for (const bool rms : {false, true}) {
      const Shape straight{2, 3, 1096}, shifted{2, 3, 1096, 1};
      const Inputs in = inputs(straight, t);
      REQUIRE(bit_difference(forward(in, shifted, t, DType::f32, rms), forward(in, straight, t, DType::f32, rms)) == "");
      REQUIRE(bit_difference(input_gradient(in, shifted, t, rms, true, false), input_gradient(in, straight, t, rms, true, false)) ==
              "");
      REQUIRE(bit_difference(weight_gradient(in, shifted, t, rms), weight_gradient(in, straight, t, rms)) == "");
    }
}

TEST_CASE("norm: gammas may be of the activations' type") {
  const Shape s{1, 3, 40};
  for (const DType t : {DType::bf16, DType::f16}) {
    Inputs in = inputs(s, t);
    in.gamma = as_stored(in.gamma, t);
    in.beta = as_stored(in.beta, t);
    REQUIRE(bit_difference(forward(in, s, t, t, false), forward(in, s, t, DType::f32, false)) == "");
  }
}

TEST_CASE("norm: the residual is added before the one rounding, and results may take an operand's place") {
  const Shape s{2, 5, 72};
  for (const bool rms : {false, true}) {
    const Inputs in = inputs(s, DType::f32);
    Floats want = input_gradient(in, s, DType::f32, rms, false, false);
    REQUIRE(bit_difference(in_both_orders([&] { return input_gradient(in, s, DType::f32, rms, false, true); }), want) == "");
    for (size_t i = 0; i < want.size(); ++i) want[i] = in.residual[i] + want[i];
    for (const bool in_place : {false, true})
      REQUIRE(bit_difference(in_both_orders([&] { return input_gradient(in, s, DType::f32, rms, true, in_place); }), want) == "");
  }
}

TEST_CASE("norm: W accumulates as old + new, and a batch is the tree over its sequences") {
  const Shape s{4, 18, 83};
  const Floats old = random_floats(s.width, 6);
  for (const bool rms : {false, true}) {
    const Inputs in = inputs(s, DType::f32);
    const Floats fresh = weight_gradient(in, s, DType::f32, rms);
    Floats want = fresh;
    for (size_t i = 0; i < want.size(); ++i) want[i] = old[i % old.size()] + want[i];
    REQUIRE(bit_difference(weight_gradient(in, s, DType::f32, rms, &old), want) == "");
    std::vector<Floats> single;
    const int64_t n = s.tokens * s.width;
    for (int64_t b = 0; b < s.sequences; ++b) {
      Inputs one = in;
      one.x = part_of(in.x, b * n, (b + 1) * n);
      one.dy = part_of(in.dy, b * n, (b + 1) * n);
      single.push_back(weight_gradient(one, {1, s.tokens, s.width}, DType::f32, rms));
    }
    REQUIRE(bit_difference(fresh, tree_of(single)) == "");
  }
}

}  // namespace shardlab::testing::of_norm
