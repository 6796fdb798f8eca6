#include "tests/kernels/support.h"
#include "tests/namespaces.h"

namespace shardlab::testing {
namespace {

struct Shape {
  int64_t sequences, tokens;
  int heads, kv_heads, head_dim;
  int64_t width() const { return int64_t{heads + 2 * kv_heads} * head_dim; }
};
const Shape kShapes[] = {{1, 1, 1, 1, 2}, {2, 7, 4, 2, 6}, {1, 17, 3, 3, 34}, {3, 5, 6, 1, 64}};
constexpr float kTheta = 500.0f;

Doubles forward64(Doubles x, const Shape& s, int64_t begin) {
  const int group_rows = s.heads / s.kv_heads + 2;
  for (int64_t row = 0; row < s.sequences * s.tokens; ++row)
    for (int r = 0; r < s.heads + 2 * s.kv_heads; ++r) {
      if (r % group_rows == group_rows - 1) continue;  // the value
      double* v = x.data() + row * s.width() + r * s.head_dim;
      for (int i = 0; i < s.head_dim / 2; ++i) {
        const double angle = static_cast<double>(begin + row % s.tokens) * std::pow(double{kTheta}, -2.0 * i / s.head_dim);
        const double a = v[i], b = v[i + s.head_dim / 2];
        v[i] = a * std::cos(angle) - b * std::sin(angle);
        v[i + s.head_dim / 2] = b * std::cos(angle) + a * std::sin(angle);
      }
    }
  return x;
}

Floats rotated(const kernels::Kernels& k, Floats x, const Shape& s, int64_t begin, bool backward, bool with_table) {
  Floats table = poisoned(s.tokens * s.head_dim);
  kernels::rope_table(begin, s.tokens, s.head_dim, kTheta, table.data());
  k.rope({.qkv = x.data(),
          .sequences = s.sequences,
          .tokens = s.tokens,
          .heads = s.heads,
          .kv_heads = s.kv_heads,
          .head_dim = s.head_dim,
          .position_begin = begin,
          .theta = kTheta,
          .backward = backward,
          .table = with_table ? table.data() : nullptr});
  return x;
}

}  // namespace

TEST_CASE("rope: F equals fp64, I equals finite differences; a table changes no bit") {
  for (const Shape& s : kShapes)
    for (const int64_t begin : {0, 1000}) {
      INFO("heads " << s.heads << " kv_heads " << s.kv_heads << " head_dim " << s.head_dim << " from position " << begin);
      const int64_t n = s.sequences * s.tokens * s.width();
      const Floats x = random_floats(n, 1), dy = random_floats(n, 2);
      const auto f = [&](const Doubles& at) { return forward64(at, s, begin); };
      const Floats y = on_every_variant([&](const kernels::Kernels& k) { return rotated(k, x, s, begin, false, false); });
      REQUIRE(difference(y, f(wide(x)), kTolerance) == "");
      REQUIRE(bit_difference(on_every_variant([&](const kernels::Kernels& k) { return rotated(k, x, s, begin, false, true); }), y) == "");
      const Floats dx = on_every_variant([&](const kernels::Kernels& k) { return rotated(k, dy, s, begin, true, false); });
      // A rotation is linear: its transpose is checked column by column on few columns, and dy.F(x) = I(dy).x on all of them.
      double left = 0, right = 0;
      for (int64_t i = 0; i < n; ++i) {
        left += double{dy[i]} * y[i];
        right += double{dx[i]} * x[i];
      }
      REQUIRE(std::abs(left - right) < 1e-4 * std::sqrt(static_cast<double>(n)));
      if (n < 600) REQUIRE(difference(dx, numeric_gradient(f, wide(x), wide(dy)), kTolerance) == "");
    }
}

}  // namespace shardlab::testing
