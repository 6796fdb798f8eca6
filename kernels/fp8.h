// Scaled fp8: where the scales come from, and to fp8 and back. A scale is what a stored value is multiplied by to give
// the real one.
//
// Scales are powers of two, so that dividing by one and multiplying by it lose nothing (but for values that leave fp32's range): a
// product of dequantised values is then the scaled product of the stored ones, and a layout that cuts a contraction gives the bits
// of one that does not. Source: Micikevicius et al. 2022; Transformer Engine's recipes (delayed and current scaling, with its
// power-of-two scales); DeepSeek-V3 technical report, section 3.3 (1x128 and 128x128 blocks).
#pragma once

#include "kernels/mixed.h"

namespace shardlab::kernels {

/// The smallest power of two s, 2^-126 to 2^126, with amax / s <= the largest value of `target`. amax 0: 1. amax infinite or NaN:
/// NaN, so that what is quantised with it is NaN throughout, and found.
float fp8_scale(float amax, DType target);

/// One step of delayed scaling. history[n]: the largest sizes of past steps, newest first. It moves on by one, `amax` enters in
/// front (0 in its place where it is not finite: the step is skipped anyhow), and the result is fp8_scale of the history's largest:
/// the scale of the next step.
struct Fp8History {
  float* history = nullptr;
  int64_t n = 0;
  float amax = 0;
  DType target = DType::f8e4m3;
};
float fp8_delayed_scale(const Fp8History& a);

/// How a matrix [rows, columns] is cut in blocks with a scale each. Blocks at the end may be smaller. scales[down(), across()].
struct Fp8Blocks {
  int64_t rows = 0, columns = 0;
  int64_t block_rows = 0, block_columns = 0;
  int64_t down() const { return (rows + block_rows - 1) / block_rows; }
  int64_t across() const { return (columns + block_columns - 1) / block_columns; }
};
/// One scale: per-tensor scaling.
inline Fp8Blocks fp8_tensor(int64_t rows, int64_t columns) { return {rows, columns, rows, columns}; }
/// 128 neighbours of a row: activations and gradients.
inline Fp8Blocks fp8_rows(int64_t rows, int64_t columns) { return {rows, columns, 1, 128}; }
/// 128 by 128: weights.
inline Fp8Blocks fp8_squares(int64_t rows, int64_t columns) { return {rows, columns, 128, 128}; }

/// scales = fp8_scale of each block's largest size. Flops: 1 an element. Of several `matrices` one behind the other, here and below, each is
/// cut in blocks by itself, and has its scales behind those of the one before.
struct Fp8FindScales {
  Stored x;
  Fp8Blocks blocks;  ///< of one matrix
  DType target = DType::f8e4m3;
  float* scales = nullptr;
  int64_t matrices = 1;
};
/// q = x / scale, rounded as Narrow does. Flops: 1 an element. Bytes: size of x + 1 an element.
struct Fp8Quantise {
  Stored x, q;
  Fp8Blocks blocks;
  const float* scales = nullptr;
  int64_t matrices = 1;
};
void fp8_find_scales(const MixedKernels& k, const Fp8FindScales& a, Scratch& scratch);
void fp8_quantise(const MixedKernels& k, const Fp8Quantise& a, Scratch& scratch);

/// A quantised matrix as an operand of the mixed kernels: copy() dequantises it, the Linears contract it.
inline Stored fp8_operand(void* q, DType dtype, const Fp8Blocks& blocks, const float* scales) {
  return {q, dtype, {scales, blocks.columns, blocks.block_rows, blocks.block_columns}};
}

}  // namespace shardlab::kernels
