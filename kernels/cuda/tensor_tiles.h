// Matrix products of a warp on the tensor cores, over tiles of 2-byte elements in shared memory.
//
// A warp's result is 16 rows by 8 n columns, in blocks of 8 columns: lane l holds, of each block, columns 2(l % 4) and the next, of
// rows l / 4 (elements 0, 1) and l / 4 + 8 (elements 2, 3). Two neighbouring blocks, rounded to 2 bytes, are exactly a left factor
// of the next product, so that scores never leave the registers.
#pragma once

#include "kernels/cuda/thread.h"
#include "kernels/cuda/vectors.h"

namespace shardlab::gpu::SHARDLAB_GPU_VARIANT {

/// kColumns elements a row and 16 bytes more: eight rows that a matrix load reads then lie in different banks.
template <int kColumns>
inline constexpr int kTileStride = kColumns + 8;

/// Blocks of 8 columns.
template <int kBlocks>
struct Sums {
  float at[kBlocks][4];
};

/// sums[16, 8 kBlocks] += a[16, kDepth] times b[8 kBlocks, kDepth] transposed: rows times rows.
template <class T, int kDepth, int kBlocks>
SHARDLAB_DEVICE void add_row_products(const Thread& t, const T* a, const T* b, Sums<kBlocks>& sums) {
  static_assert(kBlocks % 2 == 0);
  constexpr int kStride = kTileStride<kDepth>;
  const int lane = t.lane();
#pragma unroll
  for (int k = 0; k < kDepth; k += 16) {
    uint32_t left[4];
    t.template load_matrices<false>(left, a + lane % 16 * kStride + k + lane / 16 * 8);
#pragma unroll
    for (int block = 0; block < kBlocks; block += 2) {
      uint32_t right[4];
      t.template load_matrices<false>(right, b + (block * 8 + lane / 16 * 8 + lane % 8) * kStride + k + lane / 8 % 2 * 8);
      t.template multiply_add<T>(sums.at[block], left, right[0], right[1]);
      t.template multiply_add<T>(sums.at[block + 1], left, right[2], right[3]);
    }
  }
}

/// sums[16, 8 kBlocks] += weights[16, 8 kInner] (rounded to T) times b[8 kInner, 8 kBlocks], whose rows are kStride apart.
template <class T, int kStride, int kInner, int kBlocks>
SHARDLAB_DEVICE void add_weighted_rows(const Thread& t, const Sums<kInner>& weights, const T* b, Sums<kBlocks>& sums) {
  static_assert(kInner % 2 == 0 && kBlocks % 2 == 0);
  const int lane = t.lane();
#pragma unroll
  for (int k = 0; k < kInner; k += 2) {
    const float(&low)[4] = weights.at[k];
    const float(&high)[4] = weights.at[k + 1];
    const uint32_t left[4] = {packed<T>(low[0], low[1]), packed<T>(low[2], low[3]), packed<T>(high[0], high[1]),
                              packed<T>(high[2], high[3])};
#pragma unroll
    for (int block = 0; block < kBlocks; block += 2) {
      uint32_t right[4];
      t.template load_matrices<true>(right, b + (k * 8 + lane % 16) * kStride + block * 8 + lane / 16 * 8);
      t.template multiply_add<T>(sums.at[block], left, right[0], right[1]);
      t.template multiply_add<T>(sums.at[block + 1], left, right[2], right[3]);
    }
  }
}

/// Fetches rows first .. first + kRows - 1 of `columns` elements (zeros past `rows` and past `columns`) into a tile, later where
/// `vectors` says that rows are aligned and whole multiples of 16 bytes, at once where not.
template <class T, int kRows, int kColumns>
SHARDLAB_DEVICE void fetch_tile(const Thread& t, const T* from, int64_t stride, int64_t first, int64_t rows, int columns,
                                bool vectors, T* to) {
  constexpr int kChunks = kColumns / 8;
  for (int c = t.index(); c < kRows * kChunks; c += t.threads()) {
    const int row = c / kChunks, column = c % kChunks * 8;
    const T* source = from + (first + row) * stride + column;
    T* target = to + row * kTileStride<kColumns> + column;
    if (vectors) {
      const bool inside = first + row < rows && column < columns;
      t.copy_later(target, inside ? source : from, inside);
    } else {
      for (int e = 0; e < 8; ++e) target[e] = first + row < rows && column + e < columns ? source[e] : T{0};
    }
  }
}

/// Writes a warp's result, each row times its factor, by way of 16 rows of shared memory of its own. first: the row of the warp's
/// first; `rows` and `columns` bound what is written.
template <class T, int kBlocks>
SHARDLAB_DEVICE void write_tile(const Thread& t, const Sums<kBlocks>& x, const float (&factor)[2], T* staging, T* to,
                                int64_t stride, int64_t first, int64_t rows, int columns, bool vectors) {
  constexpr int kStride = kTileStride<kBlocks * 8>, kChunks = kBlocks;
  const int lane = t.lane();
  t.sync_warp();
#pragma unroll
  for (int block = 0; block < kBlocks; ++block)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t pair = packed<T>(x.at[block][2 * half] * factor[half], x.at[block][2 * half + 1] * factor[half]);
      memcpy(staging + (lane / 4 + half * 8) * kStride + block * 8 + lane % 4 * 2, &pair, sizeof pair);
    }
  t.sync_warp();
  for (int c = lane; c < 16 * kChunks; c += kWarp) {
    const int row = c / kChunks, column = c % kChunks * 8;
    if (first + row >= rows || column >= columns) continue;
    T* target = to + (first + row) * stride + column;
    const T* source = staging + row * kStride + column;
    if (vectors) {
      store(target, load<8>(source));
    } else {
      for (int e = 0; e < 8 && column + e < columns; ++e) target[e] = source[e];
    }
  }
}

}  // namespace shardlab::gpu::SHARDLAB_GPU_VARIANT
