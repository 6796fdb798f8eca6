#include "tests/cuda_kernels/support.h"
#include "tests/deal.h"
#include "tests/namespaces.h"

namespace shardlab::testing::of_attention {
namespace {

using gpu::AttentionShape;

// One token; less than a tile; several tiles with a rest, grouped queries; every padding of the depth, and depths that are no whole
// vectors.
const AttentionShape kShapes[] = {{1, 1, 1, 1, 2},     {2, 17, 4, 2, 6},  {1, 130, 2, 1, 64}, {2, 64, 2, 2, 64},
                                  {1, 100, 2, 1, 128}, {1, 70, 3, 3, 40}, {1, 50, 2, 1, 256}, {1, 35, 1, 1, 70},
                                  {1, 21, 2, 2, 136},  {1, 200, 1, 1, 10}};

/// Values that are narrower and wider than keys, in the same tile and in another; grouped queries.
AttentionShape of_widths(int64_t sequences, int64_t tokens, int heads, int kv_heads, int head_dim, int values,
                         bool canonical = false) {
  AttentionShape s{sequences, tokens, heads, kv_heads, head_dim, canonical};
  s.value_dim = values;
  return s;
}
const AttentionShape kUnequal[] = {of_widths(2, 35, 4, 2, 10, 7), of_widths(1, 70, 2, 2, 24, 18, true),
                                   of_widths(1, 33, 2, 1, 10, 18), of_widths(1, 40, 1, 1, 192, 128),
                                   of_widths(1, 21, 2, 2, 40, 130, true)};

/// The elements of a kv head: its queries, a key, a value.
int64_t group_width(const AttentionShape& s) { return s.qkv_width() / s.kv_heads; }
int64_t query_at(const AttentionShape& s, int head) {
  const int q = s.heads / s.kv_heads;
  return head / q * group_width(s) + int64_t{head % q} * s.head_dim;
}
int64_t key_at(const AttentionShape& s, int head) {
  const int q = s.heads / s.kv_heads;
  return head / q * group_width(s) + int64_t{q} * s.head_dim;
}

struct Expected {
  Doubles o, lse, dqkv;
};

/// The definition in fp64, row by row; gradients by the chain rule.
Expected expected(const Floats& qkv, const Floats& dout, const AttentionShape& s) {
  Expected e;
  const size_t rows = static_cast<size_t>(s.sequences * s.tokens), d = static_cast<size_t>(s.head_dim);
  const size_t v = static_cast<size_t>(s.values());
  const size_t width = static_cast<size_t>(s.qkv_width()), out = static_cast<size_t>(s.out_width());
  e.o.assign(rows * out, 0);
  e.dqkv.assign(rows * width, 0);
  const double scale = 1 / std::sqrt(static_cast<double>(s.head_dim));
  for (size_t b = 0; b < static_cast<size_t>(s.sequences); ++b)
    for (int head = 0; head < s.heads; ++head)
      for (size_t i = 0; i < static_cast<size_t>(s.tokens); ++i) {
        const size_t first = b * static_cast<size_t>(s.tokens), q = (first + i) * width + static_cast<size_t>(query_at(s, head));
        const auto key = [&](size_t j) { return (first + j) * width + static_cast<size_t>(key_at(s, head)); };
        const size_t o = (first + i) * out + static_cast<size_t>(head) * v;
        Doubles score;
        double most = -INFINITY, sum = 0, dot = 0;
        for (size_t j = 0; j <= i; ++j) {
          double x = 0;
          for (size_t c = 0; c < d; ++c) x += static_cast<double>(qkv[q + c]) * qkv[key(j) + c];
          score.push_back(x * scale);
          most = std::max(most, score.back());
        }
        for (const double x : score) sum += std::exp(x - most);
        e.lse.push_back(most + std::log(sum));
        for (size_t j = 0; j <= i; ++j)
          for (size_t c = 0; c < v; ++c) e.o[o + c] += std::exp(score[j] - e.lse.back()) * qkv[key(j) + d + c];
        for (size_t c = 0; c < v; ++c) dot += dout[o + c] * e.o[o + c];
        for (size_t j = 0; j <= i; ++j) {
          const double p = std::exp(score[j] - e.lse.back());
          double dp = 0;
          for (size_t c = 0; c < v; ++c) dp += static_cast<double>(dout[o + c]) * qkv[key(j) + d + c];
          const double ds = p * (dp - dot) * scale;
          for (size_t c = 0; c < d; ++c) {
            e.dqkv[q + c] += ds * qkv[key(j) + c];
            e.dqkv[key(j) + c] += ds * qkv[q + c];
          }
          for (size_t c = 0; c < v; ++c) e.dqkv[key(j) + d + c] += p * dout[o + c];
        }
      }
  return e;
}

struct Saved {
  Floats o, lse;
};
Saved forward(const Floats& qkv, const AttentionShape& s, DType t, int shift = 0) {
  const Array in(qkv, t, shift), o(Array::poison(s.sequences * s.tokens * s.out_width()), t);
  const Array lse(Array::poison(s.sequences * s.heads * s.tokens), DType::f32);
  table().attention_forward({s, in.in(), o.out(), lse.floats()}, stream());
  return {o.read(), lse.read()};
}
Floats backward(const Floats& qkv, const Floats& dout, const Saved& saved, const AttentionShape& s, DType t, int shift = 0) {
  const Array in(qkv, t, shift), d(dout, t), o(saved.o, t), lse(saved.lse, DType::f32),
      dqkv(Array::poison(static_cast<int64_t>(qkv.size())), t);
  gpu::AttentionInput a{s, d.in(), o.in(), lse.floats(), in.in(), dqkv.out(), {}};
  const Lent scratch(gpu::scratch_bytes(a));
  a.scratch = scratch;
  table().attention_input(a, stream());
  return dqkv.read();
}

/// fp32 meets fp64 as every kernel does; two-byte types round probabilities and their gradients before they are summed.
double attention_tolerance(DType t) { return t == DType::f32 ? kTolerance : 3 * tolerance(t); }

}  // namespace

TEST_CASE("attention: F and I equal fp64 in every type, depth and alignment, and with values of another width") {
  std::vector<AttentionShape> shapes(std::begin(kShapes), std::end(kShapes));
  shapes.insert(shapes.end(), std::begin(kUnequal), std::end(kUnequal));
  uint64_t number = 0;
  for (const DType t : kActivationTypes)
    for (const AttentionShape& s : shapes) {
      if (number++ % dealt(1, kWatched ? 4 : 1) != 0) continue;
      INFO(name_of(t) << " sequences " << s.sequences << " tokens " << s.tokens << " heads " << s.heads << " kv_heads "
                      << s.kv_heads << " head_dim " << s.head_dim << " values " << s.values());
      const Floats qkv = as_stored(random_floats(s.sequences * s.tokens * s.qkv_width(), 1, 2.0f), t);
      const Floats dout = as_stored(random_floats(s.sequences * s.tokens * s.out_width(), 2), t);
      const Expected want = expected(qkv, dout, s);
      Saved saved;
      in_both_orders([&] {
        saved = forward(qkv, s, t);
        return joined({saved.o, saved.lse});
      });
      REQUIRE(difference(saved.o, want.o, attention_tolerance(t)) == "");
      REQUIRE(difference(saved.lse, want.lse, kTolerance) == "");
      const Floats dqkv = in_both_orders([&] { return backward(qkv, dout, saved, s, t); });
      REQUIRE(difference(dqkv, want.dqkv, attention_tolerance(t)) == "");
    }
}

TEST_CASE("attention: arrays that are off their alignment give the same bits") {
  const AttentionShape s{1, 70, 2, 1, 64};
  for (const DType t : kActivationTypes) {
    const Floats qkv = random_floats(s.tokens * s.qkv_width(), 1), dout = random_floats(s.tokens * s.out_width(), 2);
    const Saved straight = forward(qkv, s, t), shifted = forward(qkv, s, t, 1);
    REQUIRE(bit_difference(shifted.o, straight.o) == "");
    REQUIRE(bit_difference(backward(qkv, dout, straight, s, t, 1), backward(qkv, dout, straight, s, t)) == "");
  }
}

TEST_CASE("attention: scores far from 0 neither overflow nor lose the sum") {
  const AttentionShape s{1, 80, 1, 1, 64};
  for (const DType t : kActivationTypes) {
    const Floats qkv = as_stored(random_floats(s.tokens * s.qkv_width(), 3, 60.0f), t),
                 dout = random_floats(s.tokens * s.out_width(), 4);
    const Saved saved = forward(qkv, s, t);
    REQUIRE(difference(saved.lse, expected(qkv, dout, s).lse, 1e-4) == "");
    for (const float x : joined({saved.o, backward(qkv, dout, saved, s, t)})) REQUIRE(std::isfinite(x));
  }
}

TEST_CASE("attention: a head's and a sequence's bits do not depend on which others are computed with it") {
  const AttentionShape s{2, 70, 4, 2, 64}, half{2, 70, 2, 1, 64};
  for (const DType t : kActivationTypes) {
    const Floats qkv = random_floats(s.sequences * s.tokens * s.qkv_width(), 5),
                 dout = random_floats(s.sequences * s.tokens * s.out_width(), 6);
    const Saved all = forward(qkv, s, t);
    const Floats dall = backward(qkv, dout, all, s, t);
    for (int64_t rank = 0; rank < 2; ++rank) {
      const auto mine = [&](const Floats& x, int64_t width) { return columns_of(x, 2 * width, rank * width, (rank + 1) * width); };
      const Saved saved = forward(mine(qkv, half.qkv_width()), half, t);
      REQUIRE(bit_difference(saved.o, mine(all.o, half.out_width())) == "");
      const Floats d = backward(mine(qkv, half.qkv_width()), mine(dout, half.out_width()), saved, half, t);
      REQUIRE(bit_difference(d, mine(dall, half.qkv_width())) == "");
    }
    const int64_t n = s.tokens * s.qkv_width(), out = s.tokens * s.out_width();
    const AttentionShape one{1, 70, 4, 2, 64};
    const Saved second{part_of(all.o, out, 2 * out), part_of(all.lse, s.heads * s.tokens, 2 * s.heads * s.tokens)};
    REQUIRE(bit_difference(forward(part_of(qkv, n, 2 * n), one, t).o, second.o) == "");
    REQUIRE(bit_difference(backward(part_of(qkv, n, 2 * n), part_of(dout, out, 2 * out), second, one, t),
                           part_of(dall, n, 2 * n)) == "");
  }
}

}  // namespace shardlab::testing::of_attention
