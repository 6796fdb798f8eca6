#include <cmath>

#include "tests/kernels/support.h"
#include "tests/namespaces.h"

namespace shardlab::testing::of_elementwise {
namespace {

constexpr int64_t kSizes[] = {1, 3, 16, 17, 100, 259};

Doubles activation64(const Doubles& u, bool swiglu) {
  Doubles a;
  for (size_t i = 0; i < u.size(); i += swiglu ? 2 : 1) {
    if (swiglu)
      a.push_back(u[i] / (1 + std::exp(-u[i])) * u[i + 1]);
    else
      a.push_back(0.5 * u[i] * (1 + std::tanh(0.7978845608 * (u[i] + 0.044715 * u[i] * u[i] * u[i]))));
  }
  return a;
}

}  // namespace

TEST_CASE("activation: F equals fp64, I equals finite differences, on every variant") {
  for (const bool swiglu : {false, true})
    for (const int64_t n : kSizes) {
      INFO("swiglu " << swiglu << " n " << n);
      const int64_t inputs = swiglu ? 2 * n : n;
      const Floats u = random_floats(inputs, 1, 5.0f), da = random_floats(n, 2);
      const auto f = [&](const Doubles& at) { return activation64(at, swiglu); };
      const Floats a = on_every_variant([&](const kernels::Kernels& k) {
        Floats out = poisoned(n);
        k.activation_forward({.u = u.data(), .a = out.data(), .n = n, .swiglu = swiglu});
        return out;
      });
      REQUIRE(difference(a, f(wide(u)), kTolerance) == "");
      for (int64_t i = 0; i < n; ++i)
        REQUIRE(a[i] == (swiglu ? elementary::swiglu(u[2 * i], u[2 * i + 1]) : elementary::gelu(u[i])));
      const Floats du = on_every_variant([&](const kernels::Kernels& k) {
        Floats out = poisoned(inputs);
        k.activation_input({.da = da.data(), .u = u.data(), .du = out.data(), .n = n, .swiglu = swiglu});
        return out;
      });
      REQUIRE(difference(du, numeric_gradient(f, wide(u), wide(da)), kTolerance) == "");
    }
}

TEST_CASE("activation: large arguments give the limits") {
  const Floats u{-1000, 1000, -200, 3, 200, 3};
  for (const kernels::Kernels* k : variants_here()) {
    Floats a = poisoned(2), du = poisoned(4), da{1, 1};
    k->activation_forward({.u = u.data(), .a = a.data(), .n = 2});
    REQUIRE((a[0] == 0 && a[1] == 1000));
    k->activation_input({.da = da.data(), .u = u.data(), .du = du.data(), .n = 2});
    REQUIRE((du[0] == 0 && du[1] == 1));
    k->activation_forward({.u = u.data() + 2, .a = a.data(), .n = 2, .swiglu = true});
    REQUIRE((a[0] == 0 && a[1] == 600));
    k->activation_input({.da = da.data(), .u = u.data() + 2, .du = du.data(), .n = 2, .swiglu = true});
    REQUIRE((du[0] == 0 && du[1] == 0 && du[2] == 3 && du[3] == 200));
  }
}

TEST_CASE("residual: x + (z + bias), in place or not; dbias is the sum over tokens") {
  for (const int64_t width : kSizes) {
    const int64_t rows = 6;
    const Floats x = random_floats(rows * width, 1), z = random_floats(rows * width, 2), bias = random_floats(width, 3);
    Floats want, plain;
    for (int64_t i = 0; i < rows * width; ++i) {
      want.push_back(x[i] + (z[i] + bias[i % width]));
      plain.push_back(x[i] + z[i]);
    }
    REQUIRE(bit_difference(on_every_variant([&](const kernels::Kernels& k) {
                             Floats y = x;
                             k.residual_forward(
                                 {.x = y.data(), .z = z.data(), .bias = bias.data(), .y = y.data(), .rows = rows, .width = width});
                             return y;
                           }),
                           want) == "");
    REQUIRE(bit_difference(on_every_variant([&](const kernels::Kernels& k) {
                             Floats y = poisoned(rows * width);
                             k.residual_forward({.x = x.data(), .z = z.data(), .y = y.data(), .rows = rows, .width = width});
                             return y;
                           }),
                           plain) == "");
    Doubles sums(width);
    for (int64_t i = 0; i < rows * width; ++i) sums[i % width] += x[i];
    const auto dbias = [&](bool accumulate) {
      return on_every_variant([&](const kernels::Kernels& k) {
        Floats out = accumulate ? bias : poisoned(width);
        k.bias_weight({.dy = x.data(), .dbias = out.data(), .tokens = {2, 3, {}}, .width = width, .accumulate = accumulate});
        return out;
      });
    };
    Floats fresh = dbias(false);
    REQUIRE(difference(fresh, sums, kTolerance) == "");
    for (int64_t i = 0; i < width; ++i) fresh[i] = bias[i] + fresh[i];
    REQUIRE(bit_difference(dbias(true), fresh) == "");
  }
}

TEST_CASE("sgd, adamw and lion: two steps equal fp64, on every variant") {
  for (const int64_t n : kSizes)
    for (const float decay : {0.0f, 0.1f}) {
      const Floats grad = random_floats(n, 1), param = random_floats(n, 2);
      Doubles w64 = wide(param), a64 = wide(param), l64 = wide(param), m(n), v(n), lion_m(n);
      for (int step = 0; step < 2; ++step)
        for (int64_t i = 0; i < n; ++i) {
          w64[i] -= 0.5 * (grad[i] + double{decay} * w64[i]);
          m[i] = double{0.9f} * m[i] + (1 - double{0.9f}) * grad[i];
          v[i] = double{0.95f} * v[i] + (1 - double{0.95f}) * grad[i] * grad[i];
          const double mh = m[i] / (1 - std::pow(double{0.9f}, step + 1)), vh = v[i] / (1 - std::pow(double{0.95f}, step + 1));
          a64[i] = a64[i] - 0.01 * mh / (std::sqrt(vh) + 1e-3) - 0.01 * double{decay} * a64[i];
          const double blend = double{0.9f} * lion_m[i] + (1 - double{0.9f}) * grad[i];
          l64[i] = l64[i] - 0.01 * ((blend > 0) - (blend < 0)) - 0.01 * double{decay} * l64[i];
          lion_m[i] = double{0.99f} * lion_m[i] + (1 - double{0.99f}) * grad[i];
        }
      const Floats sgd = on_every_variant([&](const kernels::Kernels& k) {
        Floats w = param;
        for (int step = 0; step < 2; ++step)
          k.sgd({.grad = grad.data(), .param = w.data(), .n = n, .learning_rate = 0.5f, .weight_decay = decay});
        return w;
      });
      REQUIRE(difference(sgd, w64, kTolerance) == "");
      const Floats lion = on_every_variant([&](const kernels::Kernels& k) {
        Floats w = param, m1(n);
        for (int step = 0; step < 2; ++step)
          k.lion({.grad = grad.data(), .param = w.data(), .m = m1.data(), .n = n, .learning_rate = 0.01f, .weight_decay = decay});
        return joined({w, m1});
      });
      REQUIRE(difference(part_of(lion, 0, n), l64, kTolerance) == "");
      REQUIRE(difference(part_of(lion, n, 2 * n), lion_m, kTolerance) == "");
      Floats moment1, moment2;
      const Floats adam = on_every_variant([&](const kernels::Kernels& k) {
        Floats w = param, m1(n), v1(n);
        for (int64_t step = 0; step < 2; ++step)
          k.adamw({.grad = grad.data(),
                   .param = w.data(),
                   .m = m1.data(),
                   .v = v1.data(),
                   .n = n,
                   .step = step,
                   .learning_rate = 0.01f,
                   .epsilon = 1e-3f,
                   .weight_decay = decay});
        return joined({w, m1, v1});
      });
      REQUIRE(difference(part_of(adam, 0, n), a64, kTolerance) == "");
      REQUIRE(difference(part_of(adam, n, 2 * n), m, kTolerance) == "");
      REQUIRE(difference(part_of(adam, 2 * n, 3 * n), v, kTolerance) == "");
    }
}

}  // namespace shardlab::testing::of_elementwise
