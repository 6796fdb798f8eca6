// Integers with block scales on the wire, and the sums that go with them: what a collective of quantised parts is made of. Parts
// are exchanged as integers, dequantised and summed in fp32, since sums of integers would overflow on their way round a ring.
// Source: Wang et al. 2023, "ZeRO++" (qwZ: weights in 8 bits; qgZ: gradients in 4, all-to-all); Dettmers et al. 2022 (block-wise).
#pragma once

#include "kernels/mixed.h"

namespace shardlab::kernels {

/// A matrix of `rows` (the parts for one rank each, say), each row of `columns` cut in `blocks` with a scale each. Blocks are
/// equal, but for the last, and for 4 bits of an even number of elements: no byte is shared between blocks, nor between rows.
struct BlockShape {
  int64_t rows = 1, columns = 0, blocks = 1;
  int bits = 8;  ///< 8 or 4
  int64_t block() const {
    const int64_t even = (columns + blocks - 1) / blocks;
    return bits == 4 ? (even + 1) / 2 * 2 : even;
  }
  int64_t row_bytes() const { return (columns * bits + 7) / 8; }
};

/// scales[rows, blocks] = largest size of the block / 127 (7), in fp32; q = x / scale to nearest even
/// (StorageKernels::quantise_int). A block of zeros has scale 0. A block with an infinity or NaN has an infinite or NaN scale
/// and dequantises to NaN throughout, so that it is found. Error: at most half a scale an element. Bytes: size of x + bits /
/// 8 an element.
struct BlockQuantise {
  BlockShape shape;
  Stored x;
  void* q = nullptr;
  float* scales = nullptr;
};
void block_quantise(const MixedKernels& k, const BlockQuantise& a, Scratch& scratch);

/// y = q * scale, in fp32, rounded to y's type.
struct BlockDequantise {
  BlockShape shape;
  const void* q = nullptr;
  const float* scales = nullptr;
  Stored y;
};
void block_dequantise(const MixedKernels& k, const BlockDequantise& a, Scratch& scratch);

/// y[columns] = `tree` over the rows of q * scale, in fp32, rounded to y's type once.
struct BlockDequantiseSum {
  BlockShape shape;
  const void* q = nullptr;
  const float* scales = nullptr;
  Stored y;
};
void block_dequantise_sum(const MixedKernels& k, const BlockDequantiseSum& a, Scratch& scratch);

/// y[columns] = `tree` over the rows of x[rows, columns], in fp32, rounded to y's type once.
struct SumRows {
  Stored x, y;
  int64_t rows = 1, columns = 0;
};
void sum_rows(const MixedKernels& k, const SumRows& a, Scratch& scratch);

}  // namespace shardlab::kernels
