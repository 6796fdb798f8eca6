#include "tests/kernels/support.h"
#include "tests/namespaces.h"

namespace shardlab::testing::of_rope {
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
      REQUIRE(bit_difference(on_every_variant([&](const kernels::Kernels& k) { return rotated(k, x, s, begin, false, true); }),
                             y) == "");
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

TEST_CASE("rope of packed documents: positions begin anew in each, on a rank's part of the sequence too") {
  // Megatron-LM#5243: tokens of later documents were rotated by positions of the first. Here two ranks have 4 of 8 tokens in zigzag order,
  // places 0 1 6 7 and 2 3 4 5 of the text, and the documents of the two sequences have 4 and 4, and 3 and 5 tokens.
  const Shape s{2, 4, 4, 2, 6};
  const std::vector<int32_t> positions{0, 1, 2, 3, 2, 3, 0, 1, /* and of the second sequence */ 0, 1, 3, 4, 2, 0, 1, 2};
  Floats table = poisoned(8 * s.head_dim);
  kernels::rope_table(0, 8, s.head_dim, kTheta, table.data());
  for (int rank = 0; rank < 2; ++rank)
    for (const bool backward : {false, true}) {
      const Floats x = random_floats(s.sequences * s.tokens * s.width(), 1);
      const Floats y = on_every_variant([&](const kernels::Kernels& k) {
        Floats z = x;
        k.rope({.qkv = z.data(),
                .sequences = s.sequences,
                .tokens = s.tokens,
                .heads = s.heads,
                .kv_heads = s.kv_heads,
                .head_dim = s.head_dim,
                .theta = kTheta,
                .backward = backward,
                .table = table.data(),
                .positions = positions.data() + rank * s.tokens,
                .positions_stride = 8});
        return z;
      });
      const Shape one{1, 1, s.heads, s.kv_heads, s.head_dim};
      for (int64_t b = 0; b < s.sequences; ++b)
        for (int64_t t = 0; t < s.tokens; ++t) {
          const int64_t row = (b * s.tokens + t) * s.width(),
                        position = positions[static_cast<size_t>(b * 8 + rank * s.tokens + t)];
          const Floats alone =
              rotated(kernels::kernels_for_this_processor(), part_of(x, row, row + s.width()), one, position, backward, false);
          REQUIRE(bit_difference(part_of(y, row, row + s.width()), alone) == "");
        }
    }
}

}  // namespace shardlab::testing::of_rope
