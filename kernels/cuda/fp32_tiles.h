// Attention on the fp32 units: a block of 16 x 16 threads works on square tiles in shared memory. Thread (y, x) has rows y, y + 16 ...
// of a tile of scores and columns x, x + 16 ...; of a result the same rows, so that a row's maximum, sum and factors stay with its 16
// threads.
#pragma once

#include <cmath>

#include "kernels/cuda/attention.h"
#include "kernels/cuda/vectors.h"

namespace shardlab::gpu::SHARDLAB_GPU_VARIANT {

inline constexpr int kSide = 16;

/// kDepth: head_dim padded with zeros; kTile: queries and keys of a tile.
template <int kDepth, int kTile>
struct Fp32Tiles {
  static constexpr int kThreads = kSide * kSide;
  static constexpr int kRows = kTile / kSide;      ///< rows (and columns of scores) of a thread
  static constexpr int kColumns = kDepth / kSide;  ///< columns of a result of a thread
  static constexpr int kStride = kDepth + 1, kScoreStride = kTile + 1;
  static constexpr int kOperand = kTile * kStride, kScores = kTile * kScoreStride;  ///< floats

  using Scores = float[kRows][kRows];
  using Result = float[kRows][kColumns];

  /// Rows first .. of one head: zeros from row `end` on and past head_dim.
  SHARDLAB_DEVICE static void fetch(const Thread& t, const float* from, int64_t stride, int64_t first, int64_t end, int head_dim,
                                    float* to) {
    for (int e = t.index(); e < kTile * kDepth; e += kThreads) {
      const int row = e / kDepth, column = e % kDepth;
      to[row * kStride + column] = first + row < end && column < head_dim ? from[(first + row) * stride + column] : 0.0f;
    }
  }
  /// The same of an array of any type, of which row 0 begins at element `at`.
  SHARDLAB_DEVICE static void fetch(const Thread& t, const Input& from, int64_t at, int64_t stride, int64_t first, int64_t end,
                                    int head_dim, float* to) {
    for (int e = t.index(); e < kTile * kDepth; e += kThreads) {
      const int row = e / kDepth, column = e % kDepth;
      const bool inside = first + row < end && column < head_dim;
      to[row * kStride + column] = inside ? values_at<1>(from, at + (first + row) * stride + column).at[0] : 0.0f;
    }
  }
  SHARDLAB_DEVICE static int row(const Thread& t, int i) { return t.index() / kSide + i * kSide; }
  SHARDLAB_DEVICE static int column(const Thread& t, int j) { return t.index() % kSide + j * kSide; }

  /// Rows of a times rows of b.
  SHARDLAB_DEVICE static void dots(const Thread& t, const float* a, const float* b, Scores& sum) {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int j = 0; j < kRows; ++j) sum[i][j] = 0;
#pragma unroll 4
    for (int d = 0; d < kDepth; ++d) {
      float x[kRows], y[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        x[i] = a[row(t, i) * kStride + d];
        y[i] = b[column(t, i) * kStride + d];
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i)
#pragma unroll
        for (int j = 0; j < kRows; ++j) sum[i][j] = ::fmaf(x[i], y[j], sum[i][j]);
    }
  }

  /// Shares a thread's scores with the other threads of its rows: they are in one warp.
  SHARDLAB_DEVICE static void share(const Thread& t, const Scores& x, float* scores) {
    t.sync_warp();
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int j = 0; j < kRows; ++j) scores[row(t, i) * kScoreStride + column(t, j)] = x[i][j];
    t.sync_warp();
  }

  /// sum += scores times b, scores as shared.
  SHARDLAB_DEVICE static void add_weighted(const Thread& t, const float* scores, const float* b, Result& sum) {
#pragma unroll 2
    for (int k = 0; k < kTile; ++k) {
      float x[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) x[i] = scores[row(t, i) * kScoreStride + k];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const float y = b[k * kStride + column(t, c)];
#pragma unroll
        for (int i = 0; i < kRows; ++i) sum[i][c] = ::fmaf(x[i], y, sum[i][c]);
      }
    }
  }

  SHARDLAB_DEVICE static void write(const Thread& t, const Result& x, const float (&factor)[kRows], float* to, int64_t stride,
                                    int64_t first, const AttentionShape& s) {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
        if (first + row(t, i) < s.tokens && column(t, c) < s.head_dim)
          to[(first + row(t, i)) * stride + column(t, c)] = x[i][c] * factor[i];
  }

  /// Over the 16 threads of a row.
  SHARDLAB_DEVICE static float row_max(const Thread& t, float x) {
#pragma unroll
    for (int mask = kSide / 2; mask >= 1; mask /= 2) {
      const float other = t.shuffle_xor(x, mask);
      x = other > x ? other : x;
    }
    return x;
  }
  SHARDLAB_DEVICE static float row_sum(const Thread& t, float x) {
#pragma unroll
    for (int mask = kSide / 2; mask >= 1; mask /= 2) x = x + t.shuffle_xor(x, mask);
    return x;
  }
};

}  // namespace shardlab::gpu::SHARDLAB_GPU_VARIANT
