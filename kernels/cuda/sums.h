// Sums in a fixed order: over a warp, over a block, over leaves.
#pragma once

#include "kernels/cuda/thread.h"

namespace shardlab::gpu::SHARDLAB_GPU_VARIANT {

/// Butterfly over the lanes of a warp: every lane gets the same bits, as x + y = y + x.
template <class T>
SHARDLAB_DEVICE T warp_sum(const Thread& t, T x) {
#pragma unroll
  for (int mask = kWarp / 2; mask >= 1; mask /= 2) x = x + t.shuffle_xor(x, mask);
  return x;
}
SHARDLAB_DEVICE float warp_max(const Thread& t, float x) {
#pragma unroll
  for (int mask = kWarp / 2; mask >= 1; mask /= 2) {
    const float other = t.shuffle_xor(x, mask);
    x = other > x ? other : x;
  }
  return x;
}

/// Threads that make `lanes` of docs/canonical-order.md: lane j of a half of a warp has added elements j, j + 16 ... of a row.
inline constexpr int kLanes = 16;
/// `tree` over the lanes of each half of a warp, neighbours first: every lane of the half gets it.
SHARDLAB_DEVICE float lanes_sum(const Thread& t, float x) {
#pragma unroll
  for (int mask = 1; mask < kLanes; mask *= 2) x = x + t.shuffle_xor(x, mask);
  return x;
}

/// For each of kSums values, the sum over a block's warps of the results of warp_sum, in warp order; every thread gets it.
/// `shared`: kSums * warps elements that nothing else uses before the block's next barrier but one.
template <int kSums, class T>
SHARDLAB_DEVICE void block_sums(const Thread& t, T (&x)[kSums], T* shared) {
#pragma unroll
  for (int i = 0; i < kSums; ++i) x[i] = warp_sum(t, x[i]);
  const int warps = t.threads() / kWarp;
  if (warps == 1) return;
  if (t.lane() == 0)
#pragma unroll
    for (int i = 0; i < kSums; ++i) shared[t.warp() * kSums + i] = x[i];
  t.barrier();
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    x[i] = shared[i];
    for (int w = 1; w < warps; ++w) x[i] = x[i] + shared[w * kSums + i];
  }
}

/// The binary counter of plan/base/tree.h for fewer than 2^kLevels leaves. Its near levels are looped over whole, so that their
/// partial sums stay in registers. The far levels, which one leaf in 2^kNear reaches, lie in memory of the thread.
template <class T, int kLevels>
class TreeCounter {
  static constexpr int kNear = kLevels < 6 ? kLevels : 6;

 public:
  SHARDLAB_DEVICE void push(T value) {
    const uint32_t count = count_++;
    bool done = false;
#pragma unroll
    for (int level = 0; level < kNear; ++level) {
      if (!done) {
        if (count >> level & 1) {
          value = partial_[level] + value;
        } else {
          partial_[level] = value;
          done = true;
        }
      }
    }
    if constexpr (kLevels > kNear) {
      if (done) return;
      int level = 0;
#pragma unroll 1
      for (; count >> (kNear + level) & 1; ++level) value = far_[level] + value;
      far_[level] = value;
    }
  }
  /// The sum; `zero` where nothing was pushed.
  SHARDLAB_DEVICE T total(T zero) const {
    bool any = false;
#pragma unroll
    for (int level = 0; level < kNear; ++level)
      if (count_ >> level & 1) {
        zero = any ? partial_[level] + zero : partial_[level];
        any = true;
      }
    if constexpr (kLevels > kNear) {
#pragma unroll 1
      for (int level = 0; level < kLevels - kNear; ++level)
        if (count_ >> (kNear + level) & 1) {
          zero = any ? far_[level] + zero : far_[level];
          any = true;
        }
    }
    return zero;
  }

 private:
  T partial_[kNear];
  T far_[kLevels > kNear ? kLevels - kNear : 1];
  uint32_t count_ = 0;
};

/// Leaves of an extent that is cut in 16, and one more of a clipped part's; sequences of a micro-batch, fewer than 2^15.
inline constexpr int kLeafLevels = 6, kSequenceLevels = 16, kTokenLevels = kSequenceLevels + 4;  // of leaves of all sequences
inline constexpr int64_t kMostSequences = (1 << 15) - 1;

}  // namespace shardlab::gpu::SHARDLAB_GPU_VARIANT
