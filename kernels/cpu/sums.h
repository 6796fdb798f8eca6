// The building blocks of docs/canonical-order.md: lanes, tree, token_tree.
#pragma once

#include "kernels/checks.h"
#include "kernels/cpu/vector.h"
#include "kernels/leaves.h"

namespace shardlab::kernels::SHARDLAB_VARIANT {

/// `tree` over the 16 lanes.
SHARDLAB_INLINE float tree_of_lanes(const Floats& x) {
  float v[kLanes];
  store(v, x);
  for (int width = kLanes / 2; width >= 1; width /= 2)
    for (int i = 0; i < width; ++i) v[i] = v[2 * i] + v[2 * i + 1];
  return v[0];
}

/// `lanes` over value(i, n) for i = 0, 16, 32 ... below `count`; value gives elements i .. i+n-1, in its first n lanes. What it
/// gives in the others is not used: absent elements are not added, which for a lane that started at +0 is the same as adding +0.
template <class Value>
SHARDLAB_INLINE float lanes(int64_t count, const Value& value) {
  Floats sum = zeros();
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) sum = sum + value(i, kLanes);
  if (i < count) {
    const int n = static_cast<int>(count - i);
    float last[kLanes];
    store(last, value(i, n));
    sum = sum + load_first(last, n);
  }
  return tree_of_lanes(sum);
}

/// The binary counter of plan/base/tree.h's TreeSum for types with operator+, without its cost of clearing partial sums.
template <class T, int kLevels>
class TreeCounter {
 public:
  SHARDLAB_INLINE void push(T value) {
    int level = 0;
    for (uint64_t carry = count_++; carry & 1; carry >>= 1, ++level) value = partial_[level] + value;
    partial_[level] = value;
  }
  /// The sum; at least one value was pushed.
  SHARDLAB_INLINE T total() const {
    int level = __builtin_ctzll(count_);
    T sum = partial_[level];
    for (uint64_t rest = count_ >> (level + 1); rest != 0; rest >>= 1)
      if (++level; rest & 1) sum = partial_[level] + sum;
    return sum;
  }

 private:
  T partial_[kLevels];
  uint64_t count_ = 0;
};

/// Which sums of a tree of leaves are complete: `push` is told which leaf comes, in ascending order; leaves without a term are left
/// out, as they change nothing. Calls join(k) where entry k + 1 of the stack is to be added to entry k; the new leaf's entry is
/// returned.
class TreeStack {
 public:
  template <class Join>
  SHARDLAB_INLINE int push(uint32_t leaf, const Join& join) {
    while (size_ >= 2 && width(at_[size_ - 2] ^ at_[size_ - 1]) < width(at_[size_ - 1] ^ leaf)) pop(join);
    at_[size_] = leaf;
    return size_++;
  }
  /// Entry 0 becomes the sum of all; false where there was no leaf.
  template <class Join>
  SHARDLAB_INLINE bool finish(const Join& join) {
    while (size_ >= 2) pop(join);
    const bool any = size_ == 1;
    size_ = 0;
    return any;
  }

 private:
  static SHARDLAB_INLINE int width(uint32_t x) { return x == 0 ? 0 : 32 - __builtin_clz(x); }
  template <class Join>
  SHARDLAB_INLINE void pop(const Join& join) {
    --size_;
    join(size_ - 1);
  }
  uint32_t at_[40];
  int size_ = 0;
};

/// Levels of a counter over sequences of a micro-batch: up to 2^15 of them.
inline constexpr int kSequenceLevels = 16;
/// Levels of a counter over the 16 leaves of an extent, and one of a clipped part's.
inline constexpr int kLeafLevels = 6;

/// C neighbouring vectors, added lane by lane.
template <int C>
struct Strip {
  Floats v[C];
};
template <int C>
SHARDLAB_INLINE Strip<C> operator+(const Strip<C>& a, const Strip<C>& b) {
  Strip<C> r;
  for (int c = 0; c < C; ++c) r.v[c] = a.v[c] + b.v[c];
  return r;
}

/// One strip of columns of token_sums. value(row, column, n) -> Floats.
template <int C, class Value>
SHARDLAB_INLINE Strip<C> token_sum_strip(const Tokens& tokens, const PartLeaves& leaves, int64_t column, int n,
                                         const Value& value) {
  TreeCounter<Strip<C>, kSequenceLevels> sequences;
  for (int64_t b = 0; b < tokens.sequences; ++b) {
    TreeCounter<Strip<C>, kLeafLevels> sequence;
    for (int leaf = 0; leaf < leaves.count(); ++leaf) {
      Strip<C> sum;
      for (int c = 0; c < C; ++c) sum.v[c] = zeros();
      for (int64_t t = leaves.begin(leaf); t < leaves.begin(leaf + 1); ++t)
        for (int c = 0; c < C; ++c) sum.v[c] = sum.v[c] + value(b * tokens.tokens + t, column + c * kLanes, n);
      sequence.push(sum);
    }
    sequences.push(sequence.total());
  }
  return sequences.total();
}

/// out[column] = `tree` over sequences of `token_tree` over value(row, column); with `accumulate` added to what out holds.
template <class Value>
SHARDLAB_INLINE void token_sums(const Tokens& tokens, int64_t width, bool accumulate, float* out, const Value& value) {
  expect(tokens.sequences >= 1 && tokens.sequences < (1 << (kSequenceLevels - 1)), "1 <= sequences < 32768", tokens.sequences);
  expect(tokens.tokens >= 1, "a sequence has a token", tokens.tokens);
  const PartLeaves leaves(tokens.part, tokens.tokens);
  expect(leaves.count() < (1 << kLeafLevels), "a part holds at most the 16 leaves of its whole", leaves.count());
  constexpr int kStrip = 4;
  int64_t column = 0;
  for (; column + kStrip * kLanes <= width; column += kStrip * kLanes) {
    const Strip<kStrip> sum = token_sum_strip<kStrip>(tokens, leaves, column, kLanes, value);
    for (int c = 0; c < kStrip; ++c) {
      float* to = out + column + c * kLanes;
      store(to, accumulate ? load(to) + sum.v[c] : sum.v[c]);
    }
  }
  for (; column < width; column += kLanes) {
    const int n = static_cast<int>(width - column < kLanes ? width - column : kLanes);
    const Floats sum = token_sum_strip<1>(tokens, leaves, column, n, value).v[0];
    float* to = out + column;
    store_first(to, accumulate ? load_first(to, n) + sum : sum, n);
  }
}

/// Calls body(i, n) for i = 0, 16 ... below count, n = 16 but for the last.
template <class Body>
SHARDLAB_INLINE void for_vectors(int64_t count, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) body(i, kLanes);
  if (i < count) body(i, static_cast<int>(count - i));
}
/// As load_first and store_first; where n is the constant 16, whole.
SHARDLAB_INLINE Floats load_some(const float* p, int n) { return n == kLanes ? load(p) : load_first(p, n); }
SHARDLAB_INLINE void store_some(float* p, const Floats& x, int n) {
  if (n == kLanes)
    store(p, x);
  else
    store_first(p, x, n);
}

/// The next n elements of scratch, which moves on to the 64-byte boundary after them.
template <class T>
SHARDLAB_INLINE T* take(void*& scratch, int64_t n) {
  T* taken = static_cast<T*>(scratch);
  scratch = static_cast<char*>(scratch) + (n * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
  return taken;
}

/// Largest |x[i]|, +0 for n = 0; a quiet NaN if any is.
SHARDLAB_INLINE float largest_size(const float* x, int64_t n) {
  // Sizes compare as their bits do, and NaNs lie above infinity.
  IntPiece most[kPieces] = {};
  for_vectors(n, [&](int64_t i, int m) {
    const Ints size = both(bits(load_some(x + i, m)), 0x7fffffff);
    for (int p = 0; p < kPieces; ++p) most[p] = size.piece[p] > most[p] ? size.piece[p] : most[p];
  });
  int32_t result = 0;
  for (int p = 0; p < kPieces; ++p)
    for (int j = 0; j < kPieceLanes; ++j) result = most[p][j] > result ? most[p][j] : result;
  return result > 0x7f800000 ? __builtin_nanf("") : from_bits(result);
}

}  // namespace shardlab::kernels::SHARDLAB_VARIANT
