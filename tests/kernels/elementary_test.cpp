#include "tests/kernels/support.h"
#include "tests/namespaces.h"

namespace shardlab::testing::of_elementary {
namespace {

/// Distance in units of the last place of the rounded exact value.
double ulps(float got, double exact) {
  const float nearest = static_cast<float>(exact);
  if (std::isinf(nearest) || std::isnan(nearest)) return got == nearest || (std::isnan(got) && std::isnan(nearest)) ? 0 : 1e9;
  int exponent = 0;
  std::frexp(nearest, &exponent);
  const double ulp = std::ldexp(1.0, std::max(exponent, -125) - 24);
  return std::abs(got - exact) / ulp;
}

/// All exponents, both signs, several mantissas each; and a fine grid where the functions bend.
Floats arguments() {
  Floats x{0.0f, -0.0f, 88.72283f, 88.72284f, -103.9f, -104.5f, 1e-45f, -87.4f, 0.625f, -0.625f};
  for (int e = -148; e <= 127; ++e)
    for (const float m : {1.0f, 1.1f, 1.25f, 1.41421f, 1.41422f, 1.7f, 1.999f})
      for (const float sign : {1.0f, -1.0f}) x.push_back(sign * std::ldexp(m, e));
  for (int i = -110000; i <= 110000; ++i) x.push_back(static_cast<float>(i) * 0.001f);
  return x;
}

using Vector = void (*)(const float*, int64_t, float*);
struct Function {
  const char* name;
  float (*scalar)(float);
  double (*exact)(double);
  Vector kernels::Kernels::*vector;
};

}  // namespace

TEST_CASE("exp, log and tanh are within 2 ulp, and scalar and vector forms have equal bits") {
  const Function functions[] = {{"exp", elementary::exp, [](double x) { return std::exp(x); }, &kernels::Kernels::exp},
                                {"log", elementary::log, [](double x) { return std::log(x); }, &kernels::Kernels::log},
                                {"tanh", elementary::tanh, [](double x) { return std::tanh(x); }, &kernels::Kernels::tanh}};
  const Floats x = arguments();
  for (const Function& f : functions) {
    INFO(f.name);
    double worst = 0;
    float at = 0;
    for (const float v : x)
      if (const double u = ulps(f.scalar(v), f.exact(v)); u > worst) {
        worst = u;
        at = v;
      }
    INFO("worst at " << at << ": " << worst << " ulp");
    CHECK(worst < 2.0);
    for (const kernels::Kernels* k : variants_here()) {
      INFO(k->name);
      Floats y = poisoned(static_cast<int64_t>(x.size()));
      (k->*f.vector)(x.data(), static_cast<int64_t>(x.size()), y.data());
      int64_t unequal = 0;
      for (size_t i = 0; i < x.size(); ++i) {
        const float want = f.scalar(x[i]);
        unequal += std::isnan(want) ? !std::isnan(y[i]) : std::memcmp(&want, &y[i], 4) != 0;
      }
      CHECK(unequal == 0);
    }
  }
}

TEST_CASE("elementary functions at the ends of their ranges") {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  CHECK(elementary::exp(0) == 1);
  CHECK(elementary::exp(-inf) == 0);
  CHECK(elementary::exp(inf) == inf);
  CHECK(std::isnan(elementary::exp(nan)));
  CHECK(elementary::log(1) == 0);
  CHECK(elementary::log(0) == -inf);
  CHECK(elementary::log(inf) == inf);
  CHECK(std::isnan(elementary::log(-1)));
  CHECK(std::isnan(elementary::log(nan)));
  CHECK(elementary::tanh(0) == 0);
  CHECK(elementary::tanh(20) == 1);
  CHECK(elementary::tanh(-inf) == -1);
  CHECK(std::isnan(elementary::tanh(nan)));
  CHECK(elementary::rsqrt(4) == 0.5f);
}

TEST_CASE("the kernels run on a named variant, and the last variant runs anywhere") {
  REQUIRE(kernels::runs_here(*kernels::all_variants().back()));
  CHECK(kernels::runs_here(kernels::kernels_for_this_processor()));
  const std::string text = description(kernels::kernels_for_this_processor());
  CHECK(text.find(std::string(kernels::kernels_for_this_processor().name) + " + oneDNN ") == 0);
  for (const kernels::Kernels* k : kernels::all_variants())
    if (!kernels::runs_here(*k)) WARN("not tested, this processor lacks it: " << k->name);
}

}  // namespace shardlab::testing::of_elementary
