#include "kernels/head_norm.h"

#include <algorithm>

#include "kernels/checks.h"
#include "kernels/window.h"
#include "plan/base/tree.h"

namespace shardlab::kernels {
namespace {

int64_t rounded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

int64_t queries(const HeadNormShape& s) { return s.heads / s.kv_heads; }
/// Elements of a token, and of a kv head in it.
int64_t group_width(const HeadNormShape& s) { return (queries(s) + 2) * s.head_dim; }
int64_t width(const HeadNormShape& s) { return s.kv_heads * group_width(s); }
int64_t stats_width(const HeadNormShape& s) { return s.heads + s.kv_heads; }

/// Calls body(first element, first statistic) for the rows of every token and kv head.
template <class Body>
void for_groups(const HeadNormShape& s, const Body& body) {
  const int64_t groups = s.tokens.rows() * s.kv_heads;
  for (int64_t i = 0; i < groups; ++i) body(i * group_width(s), i * (queries(s) + 1));
}

struct Rows {
  float* heads;   ///< [heads, head_dim] of one leaf
  float* leaves;  ///< [16, head_dim] of one sequence
  float* all;     ///< [sequences, head_dim]
  float* total;   ///< [head_dim]
  const float** at;
};

Rows rows_in(const HeadNormWeight& a) {
  const int64_t d = a.shape.head_dim;
  auto* floats = static_cast<float*>(a.scratch);
  Rows r{};
  r.heads = floats;
  r.leaves = r.heads + a.shape.heads * d;
  r.all = r.leaves + kContractionLeaves * d;
  r.total = r.all + a.shape.tokens.sequences * d;
  const int64_t used = (a.shape.heads + kContractionLeaves + a.shape.tokens.sequences + 1) * d * 4;
  r.at = reinterpret_cast<const float**>(static_cast<char*>(a.scratch) + rounded(used));
  return r;
}

/// The tree over `n` rows.
void combine(const Kernels& k, const Rows& r, const float* rows, int64_t n, int64_t d, float* to) {
  for (int64_t i = 0; i < n; ++i) r.at[i] = rows + i * d;
  k.tree_combine({r.at, static_cast<int>(n), to, d});
}

/// dgamma of `each` heads a group, the first of which is the `first`. dy(at) and x(at): the head_dim elements from `at` on.
template <class Gradient, class Input>
void sum_heads(const Kernels& k, const HeadNormWeight& a, int64_t first, int64_t each, float* dgamma, const Gradient& dy_from,
               const Input& x_from) {
  const HeadNormShape& s = a.shape;
  const int64_t d = s.head_dim, heads = each * s.kv_heads;
  const Rows r = rows_in(a);
  const PartLeaves leaves(s.tokens.part, s.tokens.tokens);
  expect(a.apart <= 1 || a.apart == leaves.count(), "head_norm: a sum for each leaf that the tokens are of; leaves",
         leaves.count());
  for (int64_t b = 0; b < s.tokens.sequences; ++b) {
    for (int leaf = 0; leaf < leaves.count(); ++leaf) {
      std::fill(r.heads, r.heads + heads * d, 0.0f);
      for (int64_t t = leaves.begin(leaf); t < leaves.begin(leaf + 1); ++t) {
        const int64_t row = b * s.tokens.tokens + t;
        for (int64_t h = 0; h < heads; ++h) {
          const int64_t group = h / each, head = first + h % each;
          const int64_t at = row * width(s) + group * group_width(s) + head * d;
          const float inverse = a.stats[row * stats_width(s) + group * (queries(s) + 1) + head];
          float* sum = r.heads + h * d;
          const float *dy = dy_from(at), *x = x_from(at);
          for (int64_t i = 0; i < d; ++i) sum[i] = sum[i] + dy[i] * (x[i] * inverse);
        }
      }
      combine(k, r, r.heads, heads, d, a.apart > 1 ? dgamma + (b * a.apart + leaf) * d : r.leaves + leaf * d);
    }
    if (a.apart <= 1) combine(k, r, r.leaves, leaves.count(), d, a.apart == 1 ? dgamma + b * d : r.all + b * d);
  }
  if (a.apart > 0) return;
  combine(k, r, r.all, s.tokens.sequences, d, a.accumulate ? r.total : dgamma);
  for (int64_t i = 0; i < d && a.accumulate; ++i) dgamma[i] = dgamma[i] + r.total[i];
}

}  // namespace

void head_norm_forward(const Kernels& k, const HeadNormForward& a) {
  const int64_t d = a.shape.head_dim, n = queries(a.shape);
  for_groups(a.shape, [&](int64_t at, int64_t stat) {
    const auto norm = [&](int64_t first, int64_t rows, const float* gamma) {
      k.norm_forward({.x = a.qkv + at + first * d,
                      .gamma = gamma,
                      .y = a.y + at + first * d,
                      .stats = a.stats + stat + first,
                      .rows = rows,
                      .width = d,
                      .epsilon = a.epsilon,
                      .rms = true});
    };
    norm(0, n, a.gamma_q);
    norm(n, 1, a.gamma_k);
    std::copy(a.qkv + at + (n + 1) * d, a.qkv + at + (n + 2) * d, a.y + at + (n + 1) * d);
  });
}

void head_norm_input(const Kernels& k, const HeadNormInput& a) {
  const int64_t d = a.shape.head_dim, n = queries(a.shape);
  for_groups(a.shape, [&](int64_t at, int64_t stat) {
    const auto norm = [&](int64_t first, int64_t rows, const float* gamma) {
      k.norm_input({.dy = a.dy + at + first * d,
                    .x = a.qkv + at + first * d,
                    .gamma = gamma,
                    .stats = a.stats + stat + first,
                    .dx = a.dqkv + at + first * d,
                    .rows = rows,
                    .width = d,
                    .rms = true});
    };
    norm(0, n, a.gamma_q);
    norm(n, 1, a.gamma_k);
    std::copy(a.dy + at + (n + 1) * d, a.dy + at + (n + 2) * d, a.dqkv + at + (n + 1) * d);
  });
}

void head_norm_weight(const Kernels& k, const HeadNormWeight& a) {
  const int64_t n = queries(a.shape);
  const auto dy = [&](int64_t at) { return a.dy + at; };
  const auto x = [&](int64_t at) { return a.qkv + at; };
  sum_heads(k, a, 0, n, a.dgamma_q, dy, x);
  sum_heads(k, a, n, 1, a.dgamma_k, dy, x);
}

void MixedKernels::head_norm_forward(const MixedHeadNormForward& a, Scratch& scratch) const {
  HeadNormForward one = a.norm;
  const int64_t w = width(one.shape), d = one.shape.head_dim, block = rows_per_block(w), rows = one.shape.tokens.rows();
  Window qkv(s_, a.qkv, block * w, scratch), y(s_, a.y, block * w, scratch);
  Window gamma_q(s_, a.gamma_q, d, scratch), gamma_k(s_, a.gamma_k, d, scratch);
  if (scratch.counting()) return;
  one.gamma_q = gamma_q.read(0, d), one.gamma_k = gamma_k.read(0, d);
  for_blocks(rows, block, [&](int64_t first, int64_t n) {
    one.shape.tokens = {1, n, {}};
    one.qkv = qkv.read(first * w, n * w);
    one.y = y.place(first * w, n * w);
    one.stats = a.norm.stats + first * stats_width(one.shape);
    kernels::head_norm_forward(k_, one);
    y.write();
  });
}

void MixedKernels::head_norm_input(const MixedHeadNormInput& a, Scratch& scratch) const {
  HeadNormInput one = a.norm;
  const int64_t w = width(one.shape), d = one.shape.head_dim, block = rows_per_block(w), rows = one.shape.tokens.rows();
  Window dy(s_, a.dy, block * w, scratch), qkv(s_, a.qkv, block * w, scratch), dqkv(s_, a.dqkv, block * w, scratch);
  Window gamma_q(s_, a.gamma_q, d, scratch), gamma_k(s_, a.gamma_k, d, scratch);
  if (scratch.counting()) return;
  one.gamma_q = gamma_q.read(0, d), one.gamma_k = gamma_k.read(0, d);
  for_blocks(rows, block, [&](int64_t first, int64_t n) {
    one.shape.tokens = {1, n, {}};
    one.dy = dy.read(first * w, n * w);
    one.qkv = qkv.read(first * w, n * w);
    one.dqkv = dqkv.place(first * w, n * w);
    one.stats = a.norm.stats + first * stats_width(one.shape);
    kernels::head_norm_input(k_, one);
    dqkv.write();
  });
}

void MixedKernels::head_norm_weight(const MixedHeadNormWeight& a, Scratch& scratch) const {
  HeadNormWeight whole = a.norm;
  const HeadNormShape& shape = whole.shape;
  const int64_t d = shape.head_dim, n = queries(shape);
  const int64_t sums = whole.apart > 0 ? shape.tokens.sequences * whole.apart * d : d;
  Window dy(s_, a.dy, d, scratch), qkv(s_, a.qkv, d, scratch);
  Window dgamma_q(s_, a.dgamma_q, sums, scratch), dgamma_k(s_, a.dgamma_k, sums, scratch);
  whole.scratch = scratch.take_bytes(head_norm_scratch_bytes(shape));
  if (scratch.counting()) return;
  const auto sum = [&](int64_t first, int64_t each, Window& dgamma) {
    float* to = whole.accumulate ? dgamma.read(0, sums) : dgamma.place(0, sums);
    sum_heads(
        k_, whole, first, each, to, [&](int64_t at) { return dy.read(at, d); }, [&](int64_t at) { return qkv.read(at, d); });
    dgamma.write();
  };
  sum(0, n, dgamma_q);
  sum(n, 1, dgamma_k);
}

int64_t head_norm_scratch_bytes(const HeadNormShape& s) {
  const int64_t pointers = std::max<int64_t>({s.heads, kContractionLeaves, s.tokens.sequences});
  return rounded(4 * (s.heads + kContractionLeaves + s.tokens.sequences + 1) * s.head_dim) + rounded(8 * pointers);
}

}  // namespace shardlab::kernels
