#include "tests/kernels/support.h"
#include "tests/namespaces.h"

namespace shardlab::testing {
namespace {

using kernels::AttentionShape;

const AttentionShape kShapes[] = {{1, 1, 1, 1, 1},   {1, 3, 2, 1, 3},  {2, 4, 1, 1, 16}, {2, 17, 4, 2, 6},
                                  {1, 19, 3, 3, 17}, {1, 33, 2, 2, 8}, {1, 6, 6, 2, 70}};

int64_t query_at(const AttentionShape& s, int head) {
  const int q = s.heads / s.kv_heads;
  return int64_t{head / q * (q + 2) + head % q} * s.head_dim;
}
int64_t key_at(const AttentionShape& s, int head) {
  const int q = s.heads / s.kv_heads;
  return int64_t{head / q * (q + 2) + q} * s.head_dim;
}

/// o, then lse, in fp64: the definition, one row of scores at a time.
Doubles forward64(const Doubles& qkv, const AttentionShape& s) {
  Doubles o(s.sequences * s.tokens * s.out_width()), lse;
  for (int64_t b = 0; b < s.sequences; ++b)
    for (int head = 0; head < s.heads; ++head)
      for (int64_t i = 0; i < s.tokens; ++i) {
        const double* q = qkv.data() + (b * s.tokens + i) * s.qkv_width() + query_at(s, head);
        Doubles p;
        double sum = 0;
        for (int64_t j = 0; j <= i; ++j) {
          const double* k = qkv.data() + (b * s.tokens + j) * s.qkv_width() + key_at(s, head);
          double score = 0;
          for (int d = 0; d < s.head_dim; ++d) score += q[d] * k[d];
          p.push_back(std::exp(score / std::sqrt(static_cast<double>(s.head_dim))));
          sum += p.back();
        }
        lse.push_back(std::log(sum));
        for (int64_t j = 0; j <= i; ++j)
          for (int d = 0; d < s.head_dim; ++d)
            o[(b * s.tokens + i) * s.out_width() + head * s.head_dim + d] +=
                p[j] / sum * qkv[(b * s.tokens + j) * s.qkv_width() + key_at(s, head) + s.head_dim + d];
      }
  o.insert(o.end(), lse.begin(), lse.end());
  return o;
}

/// o, then lse.
Floats forward(const kernels::Kernels& k, const Floats& qkv, const AttentionShape& s) {
  Floats o = poisoned(s.sequences * s.tokens * s.out_width()), lse = poisoned(s.sequences * s.heads * s.tokens);
  kernels::AttentionForward a{.shape = s, .qkv = qkv.data(), .o = o.data(), .lse = lse.data()};
  Scratch scratch(attention_scratch_bytes(a));
  a.scratch = scratch.data();
  k.attention_forward(a);
  REQUIRE(scratch.intact());
  return joined({o, lse});
}
Floats backward(const kernels::Kernels& k, const Floats& qkv, const Floats& dout, const AttentionShape& s) {
  const Floats saved = forward(k, qkv, s);
  Floats dqkv = poisoned(static_cast<int64_t>(qkv.size()));
  kernels::AttentionInput a{.shape = s,
                            .dout = dout.data(),
                            .o = saved.data(),
                            .lse = saved.data() + s.sequences * s.tokens * s.out_width(),
                            .qkv = qkv.data(),
                            .dqkv = dqkv.data()};
  Scratch scratch(attention_scratch_bytes(a));
  a.scratch = scratch.data();
  k.attention_input(a);
  REQUIRE(scratch.intact());
  return dqkv;
}

}  // namespace

TEST_CASE("attention: F equals fp64, I equals finite differences, on every variant") {
  for (const AttentionShape& s : kShapes) {
    INFO("sequences " << s.sequences << " tokens " << s.tokens << " heads " << s.heads << " kv_heads " << s.kv_heads << " head_dim "
                      << s.head_dim);
    const int64_t n = s.sequences * s.tokens * s.qkv_width(), out = s.sequences * s.tokens * s.out_width();
    const Floats qkv = random_floats(n, 1, 2.0f), dout = random_floats(out, 2);
    const auto f = [&](const Doubles& at) { return part_of(forward64(at, s), 0, out); };
    REQUIRE(difference(on_every_variant([&](const kernels::Kernels& k) { return forward(k, qkv, s); }), forward64(wide(qkv), s),
                       kTolerance) == "");
    const Doubles want = numeric_gradient(f, wide(qkv), wide(dout));
    REQUIRE(difference(on_every_variant([&](const kernels::Kernels& k) { return backward(k, qkv, dout, s); }), want, kTolerance) == "");
  }
}

TEST_CASE("attention: scores far from 0 neither overflow nor lose the sum") {
  const AttentionShape s{1, 40, 1, 1, 8};
  const Floats qkv = random_floats(s.tokens * s.qkv_width(), 3, 60.0f);
  const Floats got = on_every_variant([&](const kernels::Kernels& k) { return forward(k, qkv, s); });
  Doubles want = forward64(wide(qkv), s);  // fp64 holds e^(60 * 60 * 8 / 2.8) only where scores stay below 709
  for (size_t i = 0; i < got.size(); ++i) REQUIRE(std::isfinite(got[i]));
  for (int64_t i = 0; i < s.tokens * s.head_dim; ++i)
    if (std::isfinite(want[i])) REQUIRE(std::abs(got[i] - want[i]) < 1e-2 * 60);
}

TEST_CASE("attention: a head's and a sequence's bits do not depend on which others are computed with it") {
  const AttentionShape s{2, 21, 4, 2, 10};
  const Floats qkv = random_floats(s.sequences * s.tokens * s.qkv_width(), 4),
               dout = random_floats(s.sequences * s.tokens * s.out_width(), 5);
  const AttentionShape half{2, 21, 2, 1, 10};
  for (const kernels::Kernels* k : variants_here()) {
    const Floats all = forward(*k, qkv, s), dall = backward(*k, qkv, dout, s);
    for (int rank = 0; rank < 2; ++rank) {
      const Floats mine = columns_of(qkv, s.qkv_width(), rank * half.qkv_width(), (rank + 1) * half.qkv_width());
      const Floats dmine = columns_of(dout, s.out_width(), rank * half.out_width(), (rank + 1) * half.out_width());
      const int64_t out = s.sequences * s.tokens * s.out_width(), half_out = out / 2;
      REQUIRE(bit_difference(
                  part_of(forward(*k, mine, half), 0, half_out),
                  columns_of(part_of(all, 0, out), s.out_width(), rank * half.out_width(), (rank + 1) * half.out_width())) == "");
      REQUIRE(bit_difference(backward(*k, mine, dmine, half),
                             columns_of(dall, s.qkv_width(), rank * half.qkv_width(), (rank + 1) * half.qkv_width())) == "");
    }
    const AttentionShape one{1, 21, 4, 2, 10};
    const int64_t n = s.tokens * s.qkv_width(), out = s.tokens * s.out_width();
    REQUIRE(bit_difference(backward(*k, part_of(qkv, n, 2 * n), part_of(dout, out, 2 * out), one), part_of(dall, n, 2 * n)) == "");
  }
}

}  // namespace shardlab::testing
