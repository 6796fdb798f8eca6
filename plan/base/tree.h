// The canonical order of a sum: one fixed binary tree over numbered leaves.
//
// For n leaves the tree is the binary counter's: leaves are combined in aligned blocks of 1, 2, 4, ...;
// blocks left over at the end are joined from the smallest to the largest. Any aligned power-of-two block
// of leaves is a subtree, so ranks, micro-batches and sequences can each sum their block and a parent can
// combine the blocks: the bits do not depend on who summed what (ARCHITECTURE.md, "How equal is equal").
#pragma once

#include <array>
#include <bit>
#include <cstdint>

namespace shardlab {

/// Sums values that arrive one by one in leaf order. `Add` is (T left, T right) -> T.
/// State: one partial sum for each set bit of the count, as in a binary counter.
template <class T, class Add>
class TreeSum {
 public:
  explicit TreeSum(Add add = {}) : add_(add) {}

  void push(T value) {
    uint64_t carry = count_++;
    int level = 0;
    for (; carry & 1; carry >>= 1, ++level) value = add_(partial_[level], value);
    partial_[level] = value;
  }
  uint64_t count() const { return count_; }
  /// The sum of all leaves pushed; `zero` when there is none.
  T total(T zero) const {
    if (count_ == 0) return zero;
    int level = std::countr_zero(count_);
    T sum = partial_[level];
    for (uint64_t rest = count_ >> (level + 1); rest != 0; rest >>= 1)
      if (++level; rest & 1) sum = add_(partial_[level], sum);
    return sum;
  }

 private:
  std::array<T, 64> partial_{};
  uint64_t count_ = 0;
  Add add_;
};

/// Tree sum of `leaf(i)` for i in [0, n), n >= 1, by recursion: same tree as `TreeSum`.
/// Split n at the largest power of two below it.
template <class Leaf, class Add>
auto tree_sum(int64_t first, int64_t n, const Leaf& leaf, const Add& add) -> decltype(leaf(first)) {
  if (n == 1) return leaf(first);
  const int64_t left = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(n - 1)));
  return add(tree_sum(first, left, leaf, add), tree_sum(first + left, n - left, leaf, add));
}

/// Contractions are cut into this many leaves along K; tensor-parallel sizes divide it.
inline constexpr int kContractionLeaves = 16;

/// First index of leaf `i` of `leaves` over an extent of `n`: leaf i is [begin(i), begin(i + 1)). If a shard's extent is n * j /
/// leaves, its leaves are leaves of the whole extent.
constexpr int64_t leaf_begin(int64_t n, int i, int leaves = kContractionLeaves) { return n * i / leaves; }

}  // namespace shardlab
