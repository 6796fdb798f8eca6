// Cross-entropy. Row by row, so that a row's later passes find it in the cache.
#include "kernels/cpu/formulas.h"
#include "kernels/cpu/sums.h"
#include "kernels/cpu/variant.h"

namespace shardlab::kernels::SHARDLAB_VARIANT {
namespace {

SHARDLAB_INLINE int64_t at_most(int64_t n, int64_t limit) { return n < limit ? n : limit; }

float row_max(const float* x, int64_t n) {
  Floats most = floats(-__builtin_inff());
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) most = larger(most, load(x + i));
  float v[kLanes];
  store(v, most);
  float result = v[0];
  for (int j = 1; j < kLanes; ++j) result = v[j] > result ? v[j] : result;
  for (; i < n; ++i) result = x[i] > result ? x[i] : result;
  return result;
}

/// Sum of exp(x - max) over words: lanes in a leaf, tree over leaves. With kKeep the exponentials replace x.
template <bool kKeep>
float exponential_sum(float* x, const PartLeaves& leaves, int64_t words, float max) {
  const Floats most = floats(max);
  TreeCounter<float, kLeafLevels> sum;
  for (int leaf = 0; leaf < leaves.count(); ++leaf) {
    const int64_t begin = at_most(leaves.begin(leaf), words), end = at_most(leaves.begin(leaf + 1), words);
    float* from = x + begin;
    sum.push(lanes(end - begin, [=](int64_t i, int n) {
      const Floats e = exp_formula(load_some(from + i, n) - most);
      if constexpr (kKeep) store_some(from + i, e, n);
      return e;
    }));
  }
  return sum.total();
}

/// dlogits from exponentials: (e * (1 / sum) - [target]) * scale. target: its column here, or outside of [0, n).
void to_gradient(float* e, int64_t n, float sum, int64_t target, float scale) {
  const Floats inverse = floats(1.0f / sum), factor = floats(scale);
  const bool held = target >= 0 && target < n;
  const float at_target = held ? (e[target] * (1.0f / sum) - 1.0f) * scale : 0.0f;
  for_vectors(n, [=](int64_t i, int m) { store_some(e + i, (load_some(e + i, m) * inverse) * factor, m); });
  if (held) e[target] = at_target;
}

/// Padding behind the words has no gradient.
void clear_padding(float* x, int64_t words, int64_t columns) {
  for (int64_t i = words; i < columns; ++i) x[i] = 0.0f;
}

/// nll of each sequence: token_tree over loss(row).
template <class Loss>
SHARDLAB_INLINE void sum_losses(const CrossEntropy& a, const Loss& loss) {
  const PartLeaves leaves(a.tokens.part, a.tokens.tokens);
  for (int64_t b = 0; b < a.tokens.sequences; ++b) {
    TreeCounter<float, kLeafLevels> sequence;
    for (int leaf = 0; leaf < leaves.count(); ++leaf) {
      float sum = 0;
      for (int64_t t = leaves.begin(leaf); t < leaves.begin(leaf + 1); ++t) sum += loss(b * a.tokens.tokens + t);
      sequence.push(sum);
    }
    a.nll[b] = sequence.total();
  }
}

void check(const CrossEntropy& a) {
  expect(a.vocab >= 1, "cross_entropy: at least one column", a.vocab);
  expect(a.tokens.tokens >= 1, "cross_entropy: a sequence has a token", a.tokens.tokens);
}

int64_t target_column(const CrossEntropy& a, int64_t row) {
  const int64_t total = a.words != 0 ? a.words : a.vocab_part.total == 0 ? a.vocab : a.vocab_part.total;
  expect(a.targets[row] >= 0 && a.targets[row] < total, "cross_entropy: a target is an id of the vocabulary", a.targets[row]);
  return a.targets[row] - a.vocab_part.begin;
}

}  // namespace

void cross_entropy_fused(const CrossEntropy& a) {
  check(a);
  const PartLeaves leaves(a.vocab_part, a.vocab);
  const int64_t words = words_held(a.vocab_part, a.vocab, a.words);
  const float scale = a.loss_scale / static_cast<float>(a.loss_tokens);
  sum_losses(a, [&](int64_t row) {
    float* x = a.logits + row * a.vocab;
    const int64_t target = target_column(a, row);
    expect(target >= 0 && target < a.vocab, "cross_entropy: the fused form holds the whole vocabulary", target);
    const float target_logit = x[target], max = row_max(x, words);
    const float sum = exponential_sum<true>(x, leaves, words, max);
    to_gradient(x, words, sum, target, scale);
    clear_padding(x, words, a.vocab);
    return (log_formula(sum) + max) - target_logit;
  });
}

void cross_entropy_loss_only(const CrossEntropy& a) {
  check(a);
  const PartLeaves leaves(a.vocab_part, a.vocab);
  const int64_t words = words_held(a.vocab_part, a.vocab, a.words);
  sum_losses(a, [&](int64_t row) {
    float* x = a.logits + row * a.vocab;
    const int64_t target = target_column(a, row);
    expect(target >= 0 && target < a.vocab, "cross_entropy: the loss-only form holds the whole vocabulary", target);
    const float max = row_max(x, words);
    return (log_formula(exponential_sum<false>(x, leaves, words, max)) + max) - x[target];
  });
}

void cross_entropy_max(const CrossEntropy& a) {
  check(a);
  const int64_t words = words_held(a.vocab_part, a.vocab, a.words);
  for (int64_t row = 0; row < a.tokens.rows(); ++row) a.max[row] = row_max(a.logits + row * a.vocab, words);
}

void cross_entropy_sum(const CrossEntropy& a) {
  check(a);
  const PartLeaves leaves(a.vocab_part, a.vocab);
  const int64_t words = words_held(a.vocab_part, a.vocab, a.words);
  for (int64_t row = 0; row < a.tokens.rows(); ++row) {
    float* x = a.logits + row * a.vocab;
    const int64_t target = target_column(a, row);
    a.sums[2 * row] = exponential_sum<false>(x, leaves, words, a.max[row]);
    a.sums[2 * row + 1] = target >= 0 && target < a.vocab ? x[target] : 0.0f;
  }
}

void cross_entropy_grad(const CrossEntropy& a) {
  check(a);
  const int64_t words = words_held(a.vocab_part, a.vocab, a.words);
  const float scale = a.loss_scale / static_cast<float>(a.loss_tokens);
  sum_losses(a, [&](int64_t row) {
    float* x = a.logits + row * a.vocab;
    const float max = a.max[row], sum = a.sums[2 * row];
    const Floats most = floats(max);
    for_vectors(words, [=](int64_t i, int n) { store_some(x + i, exp_formula(load_some(x + i, n) - most), n); });
    to_gradient(x, words, sum, target_column(a, row), scale);
    clear_padding(x, words, a.vocab);
    return (log_formula(sum) + max) - a.sums[2 * row + 1];
  });
}

}  // namespace shardlab::kernels::SHARDLAB_VARIANT
