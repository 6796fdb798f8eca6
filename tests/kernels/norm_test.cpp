#include "tests/kernels/support.h"
#include "tests/namespaces.h"

namespace shardlab::testing::of_norm {
namespace {

struct Shape {
  int64_t sequences, tokens, width;
  int64_t rows() const { return sequences * tokens; }
};
const Shape kShapes[] = {{1, 1, 1}, {1, 3, 3}, {2, 17, 17}, {3, 5, 64}, {2, 16, 23}, {1, 5, 130}};
constexpr float kEpsilon = 1e-3f;  // large enough to show in the result

/// y[rows,width] from (x, gamma, beta) joined, in fp64.
Doubles forward64(const Doubles& in, const Shape& s, bool rms) {
  const double *x = in.data(), *gamma = x + s.rows() * s.width, *beta = gamma + s.width;
  Doubles y;
  for (int64_t r = 0; r < s.rows(); ++r, x += s.width) {
    double mean = 0, square = 0;
    for (int64_t i = 0; i < s.width; ++i) mean += rms ? 0 : x[i] / static_cast<double>(s.width);
    for (int64_t i = 0; i < s.width; ++i) square += (x[i] - mean) * (x[i] - mean) / static_cast<double>(s.width);
    const double rstd = 1 / std::sqrt(square + static_cast<double>(kEpsilon));
    for (int64_t i = 0; i < s.width; ++i) y.push_back((x[i] - mean) * rstd * gamma[i] + (rms ? 0 : beta[i]));
  }
  return y;
}

struct Inputs {
  Floats x, gamma, beta, dy, residual;
};
Inputs inputs(const Shape& s) {
  Inputs in{random_floats(s.rows() * s.width, 1, 2.0f), random_floats(s.width, 2), random_floats(s.width, 3),
            random_floats(s.rows() * s.width, 4), random_floats(s.rows() * s.width, 5)};
  for (float& v : in.x) v += 0.3f;  // a mean that is not 0
  return in;
}

/// y, stats joined.
Floats forward(const kernels::Kernels& k, const Inputs& in, const Shape& s, bool rms, Floats* stats_out = nullptr) {
  Floats y = poisoned(s.rows() * s.width), stats = poisoned(s.rows() * (rms ? 1 : 2));
  k.norm_forward({.x = in.x.data(),
                  .gamma = in.gamma.data(),
                  .beta = rms ? nullptr : in.beta.data(),
                  .y = y.data(),
                  .stats = stats.data(),
                  .rows = s.rows(),
                  .width = s.width,
                  .epsilon = kEpsilon,
                  .rms = rms});
  if (stats_out != nullptr) *stats_out = stats;
  return joined({y, stats});
}
Floats input_gradient(const kernels::Kernels& k, const Inputs& in, const Shape& s, bool rms, bool residual) {
  Floats stats, dx = poisoned(s.rows() * s.width);
  forward(k, in, s, rms, &stats);
  k.norm_input({.dy = in.dy.data(),
                .x = in.x.data(),
                .gamma = in.gamma.data(),
                .stats = stats.data(),
                .residual = residual ? in.residual.data() : nullptr,
                .dx = dx.data(),
                .rows = s.rows(),
                .width = s.width,
                .rms = rms});
  return dx;
}
/// dgamma and, without rms, dbeta, joined.
Floats weight_gradient(const kernels::Kernels& k, const Inputs& in, const Shape& s, bool rms, const Floats* old = nullptr) {
  Floats stats, dgamma = poisoned(s.width), dbeta = poisoned(s.width);
  if (old != nullptr) dgamma = dbeta = *old;
  forward(k, in, s, rms, &stats);
  k.norm_weight({.dy = in.dy.data(),
                 .x = in.x.data(),
                 .stats = stats.data(),
                 .dgamma = dgamma.data(),
                 .dbeta = rms ? nullptr : dbeta.data(),
                 .tokens = {s.sequences, s.tokens, {}},
                 .width = s.width,
                 .rms = rms,
                 .accumulate = old != nullptr});
  return rms ? dgamma : joined({dgamma, dbeta});
}

}  // namespace

TEST_CASE("norm: F equals fp64, I and W equal finite differences, on every variant") {
  for (const bool rms : {false, true})
    for (const Shape& s : kShapes) {
      INFO("rms " << rms << " sequences " << s.sequences << " tokens " << s.tokens << " width " << s.width);
      const Inputs in = inputs(s);
      const Doubles all = wide(joined({in.x, in.gamma, in.beta}));
      const auto f = [&](const Doubles& at) { return forward64(at, s, rms); };
      const Floats y = on_every_variant([&](const kernels::Kernels& k) { return forward(k, in, s, rms); });
      REQUIRE(difference(part_of(y, 0, s.rows() * s.width), f(all), kTolerance) == "");
      const Doubles gradient = numeric_gradient(f, all, wide(in.dy));
      const int64_t n = s.rows() * s.width;
      const Floats dx = on_every_variant([&](const kernels::Kernels& k) { return input_gradient(k, in, s, rms, false); });
      if (rms || s.width > 1) REQUIRE(difference(dx, part_of(gradient, 0, n), 10 * kTolerance) == "");
      const Floats dw = on_every_variant([&](const kernels::Kernels& k) { return weight_gradient(k, in, s, rms); });
      if (rms || s.width > 1) REQUIRE(difference(dw, part_of(gradient, n, n + (rms ? 1 : 2) * s.width), kTolerance) == "");
    }
}

TEST_CASE("norm: the residual operand is added to the input gradient") {
  const Shape s{2, 5, 37};
  const Inputs in = inputs(s);
  for (const bool rms : {false, true}) {
    Floats want = on_every_variant([&](const kernels::Kernels& k) { return input_gradient(k, in, s, rms, false); });
    for (size_t i = 0; i < want.size(); ++i) want[i] = in.residual[i] + want[i];
    REQUIRE(bit_difference(on_every_variant([&](const kernels::Kernels& k) { return input_gradient(k, in, s, rms, true); }), want) == "");
  }
}

TEST_CASE("norm: W accumulates as old + new, and a batch is the tree over its sequences") {
  const Shape s{4, 18, 83};
  const Inputs in = inputs(s);
  const Floats old = random_floats(s.width, 6);
  for (const bool rms : {false, true}) {
    const Floats fresh = on_every_variant([&](const kernels::Kernels& k) { return weight_gradient(k, in, s, rms); });
    Floats want = fresh;
    for (size_t i = 0; i < want.size(); ++i) want[i] = old[i % old.size()] + want[i];
    REQUIRE(bit_difference(on_every_variant([&](const kernels::Kernels& k) { return weight_gradient(k, in, s, rms, &old); }), want) == "");
    std::vector<Floats> single;
    const int64_t n = s.tokens * s.width;
    for (int64_t b = 0; b < s.sequences; ++b) {
      Inputs one = in;
      one.x = part_of(in.x, b * n, (b + 1) * n);
      one.dy = part_of(in.dy, b * n, (b + 1) * n);
      single.push_back(weight_gradient(kernels::kernels_for_this_processor(), one, {1, s.tokens, s.width}, rms));
    }
    REQUIRE(bit_difference(fresh, tree_of(single)) == "");
  }
}

}  // namespace shardlab::testing::of_norm
