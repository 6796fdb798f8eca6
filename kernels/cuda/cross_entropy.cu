// Cross-entropy, whole or over a part of the vocabulary. A block a row; the row is read from memory once where shared
// memory holds it.
//
// Max first, then the sum of exponentials leaf by leaf: the fused form has the bits of the vocabulary-parallel parts.
#include <cmath>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/launches.h"
#include "kernels/cuda/sums.h"
#include "kernels/cuda/vectors.h"

namespace shardlab::gpu::SHARDLAB_GPU_VARIANT {
namespace {

enum class Part { kFused, kLossOnly, kMax, kSum, kGrad };

/// Floats of shared memory before the row: two rounds of one number a warp.
constexpr int kRounds = 2 * kWarp;

template <class T, int kVector, Part kPart>
struct CrossEntropyRows {
  static constexpr int kThreads = kMostThreads;
  static constexpr bool kFindsMax = kPart == Part::kFused || kPart == Part::kLossOnly || kPart == Part::kMax;
  static constexpr bool kSums = kPart == Part::kFused || kPart == Part::kLossOnly || kPart == Part::kSum;
  static constexpr bool kGradient = kPart == Part::kFused || kPart == Part::kGrad;
  struct Args {
    gpu::CrossEntropy a;
    float* losses;  ///< [rows], or null
    bool cached;
  };

  SHARDLAB_DEVICE static void run(const Thread& t, const Args& args) {
    const gpu::CrossEntropy& a = args.a;
    const int64_t row = t.block_x();
    T* logits = static_cast<T*>(a.logits.data) + row * a.vocab;
    float* shared = reinterpret_cast<float*>(t.shared());
    T* cache = reinterpret_cast<T*>(shared + kRounds);
    const T* x = args.cached ? cache : logits;
    const int64_t target = kPart == Part::kMax ? -1 : a.targets[row] - a.vocab_part.begin;
    const bool held = target >= 0 && target < a.vocab;

    float max;
    if constexpr (kFindsMax) {
      max = row_max(t, logits, args.cached ? cache : nullptr, a, shared);
      if constexpr (kPart == Part::kMax) {
        if (t.index() == 0) a.max[row] = max;
        return;
      }
    } else {
      max = a.max[row];
    }
    const float target_logit = held ? value_of(x[target]) : 0.0f;
    float sum;
    if constexpr (kSums) {
      sum = exponential_sum(t, x, a, max, shared + kWarp);
      if constexpr (kPart == Part::kSum) {
        if (t.index() == 0) {
          a.sums[2 * row] = sum;
          a.sums[2 * row + 1] = target_logit;
        }
        return;
      }
    } else {
      sum = a.sums[2 * row];
    }
    if (t.index() == 0) args.losses[row] = loss(a, row, max, sum, target_logit);
    if constexpr (kGradient) gradient(t, x, logits, a, max, sum, target);
  }

 private:
  SHARDLAB_DEVICE static float row_max(const Thread& t, const T* from, T* cache, const gpu::CrossEntropy& a, float* shared) {
    const int64_t words = kernels::words_held(a.vocab_part, a.vocab, a.words);
    float most = -INFINITY;
    for (int64_t i = int64_t{t.index()} * kVector; i < a.vocab; i += int64_t{t.threads()} * kVector) {
      const Vector<T, kVector> v = load<kVector>(from + i);
      if (cache != nullptr) store(cache + i, v);
#pragma unroll
      for (int j = 0; j < kVector; ++j) most = i + j < words && value_of(v.at[j]) > most ? value_of(v.at[j]) : most;
    }
    most = warp_max(t, most);
    if (t.lane() == 0) shared[t.warp()] = most;
    t.barrier();
    for (int w = 0; w < t.threads() / kWarp; ++w) most = shared[w] > most ? shared[w] : most;
    return most;
  }

  /// Leaf i is summed by warp i: lane l takes every 32nd element of the leaf from l on. Then the tree over leaves.
  SHARDLAB_DEVICE static float exponential_sum(const Thread& t, const T* x, const gpu::CrossEntropy& a, float max, float* shared) {
    const kernels::PartLeaves leaves(a.vocab_part, a.vocab);
    const int64_t words = kernels::words_held(a.vocab_part, a.vocab, a.words);
    const int64_t end = leaves.begin(t.warp() + 1) < words ? leaves.begin(t.warp() + 1) : words;
    float sum = 0;
#pragma unroll 4
    for (int64_t i = leaves.begin(t.warp()) + t.lane(); i < end; i += kWarp) sum = sum + ::expf(value_of(x[i]) - max);
    sum = warp_sum(t, sum);
    if (t.lane() == 0) shared[t.warp()] = sum;
    t.barrier();
    TreeCounter<float, kLeafLevels> total;
    for (int leaf = 0; leaf < leaves.count(); ++leaf) total.push(shared[leaf]);
    return total.total(0.0f);
  }

  SHARDLAB_DEVICE static float loss(const gpu::CrossEntropy& a, int64_t row, float max, float sum, float target_logit) {
    const int64_t id = a.targets[row], total = a.words != 0 ? a.words : a.vocab_part.total == 0 ? a.vocab : a.vocab_part.total;
    if (id < 0 || id >= total) return NAN;
    return (::logf(sum) + max) - (kPart == Part::kGrad ? a.sums[2 * row + 1] : target_logit);
  }

  SHARDLAB_DEVICE static void gradient(const Thread& t, const T* x, T* logits, const gpu::CrossEntropy& a, float max, float sum,
                                       int64_t target) {
    const float inverse = 1.0f / sum, scale = (a.loss_scale == nullptr ? 1.0f : *a.loss_scale) / static_cast<float>(a.loss_tokens);
    const int64_t words = kernels::words_held(a.vocab_part, a.vocab, a.words);
    t.barrier();  // every thread has read the target's logit
    for (int64_t i = int64_t{t.index()} * kVector; i < a.vocab; i += int64_t{t.threads()} * kVector) {
      Values<kVector> v = values_at<kVector>(x + i);
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        const float p = ::expf(v.at[j] - max) * inverse;
        v.at[j] = i + j < words ? (i + j == target ? p - 1.0f : p) * scale : 0.0f;
      }
      put(logits + i, v);
    }
  }
};

/// nll of each sequence: its rows' losses, a warp a leaf, then the tree.
struct SequenceLosses {
  static constexpr int kThreads = kMostThreads;
  struct Args {
    const float* losses;
    float* nll;
    Tokens tokens;
  };
  SHARDLAB_DEVICE static void run(const Thread& t, const Args& a) {
    const kernels::PartLeaves leaves(a.tokens.part, a.tokens.tokens);
    const float* losses = a.losses + t.block_x() * a.tokens.tokens;
    const int64_t end = leaves.begin(t.warp() + 1);
    float sum = 0;
    for (int64_t i = leaves.begin(t.warp()) + t.lane(); i < end; i += kWarp) sum = sum + losses[i];
    sum = warp_sum(t, sum);
    float* shared = reinterpret_cast<float*>(t.shared());
    if (t.lane() == 0) shared[t.warp()] = sum;
    t.barrier();
    if (t.index() != 0) return;
    TreeCounter<float, kLeafLevels> total;
    for (int leaf = 0; leaf < leaves.count(); ++leaf) total.push(shared[leaf]);
    a.nll[t.block_x()] = total.total(0.0f);
  }
};

template <Part kPart>
void cross_entropy(const char* name, const gpu::CrossEntropy& a, Stream s) {
  expect(a.vocab >= 1, "cross_entropy: at least one column", a.vocab);
  expect(a.tokens.tokens >= 1, "cross_entropy: a sequence has a token", a.tokens.tokens);
  const int leaves = kernels::PartLeaves(a.vocab_part, a.vocab).count();
  constexpr bool kLosses = kPart == Part::kFused || kPart == Part::kLossOnly || kPart == Part::kGrad;
  if (kLosses) expect(a.scratch.bytes >= scratch_bytes(a), "cross_entropy: scratch is large enough", a.scratch.bytes);
  if (kPart == Part::kFused || kPart == Part::kLossOnly)
    expect(a.vocab_part.total == 0 || a.vocab_part.total == a.vocab, "cross_entropy: this form holds the whole vocabulary",
           a.vocab);
  with_type(a.logits.dtype, "cross_entropy: logits are f32, bf16 or f16", [&]<class T>(Named<T>) {
    with_vector<kVectorOf<T>>(aligned({a.logits.data}) && a.vocab % kVectorOf<T> == 0, [&](auto vector) {
      const geometry::VocabularyRow row = geometry::cross_entropy(a.tokens.rows(), a.vocab, leaves, sizeof(T));
      // The vocabulary-parallel parts look at the row once.
      const bool cached = row.cached && (kPart == Part::kFused || kPart == Part::kLossOnly);
      Geometry g = row.geometry;
      if (!cached) g.shared = kRounds * 4;
      launch<CrossEntropyRows<T, vector.value, kPart>>(name, g, {a, static_cast<float*>(a.scratch.data), cached}, s);
    });
  });
  if (kLosses)
    launch<SequenceLosses>(
        name, geometry::sequence_losses(a.tokens.sequences, kernels::PartLeaves(a.tokens.part, a.tokens.tokens).count()),
        {static_cast<float*>(a.scratch.data), a.nll, a.tokens}, s);
}

}  // namespace

void cross_entropy_fused(const gpu::CrossEntropy& a, Stream s) { cross_entropy<Part::kFused>("cross_entropy_fused", a, s); }
void cross_entropy_loss_only(const gpu::CrossEntropy& a, Stream s) {
  cross_entropy<Part::kLossOnly>("cross_entropy_loss_only", a, s);
}
void cross_entropy_max(const gpu::CrossEntropy& a, Stream s) { cross_entropy<Part::kMax>("cross_entropy_max", a, s); }
void cross_entropy_sum(const gpu::CrossEntropy& a, Stream s) { cross_entropy<Part::kSum>("cross_entropy_sum", a, s); }
void cross_entropy_grad(const gpu::CrossEntropy& a, Stream s) { cross_entropy<Part::kGrad>("cross_entropy_grad", a, s); }

}  // namespace shardlab::gpu::SHARDLAB_GPU_VARIANT
