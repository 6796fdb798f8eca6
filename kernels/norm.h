// LayerNorm and RMSNorm over the last dim.
// Source: Ba, Kiros & Hinton 2016 (LayerNorm); Zhang & Sennrich 2019 (RMSNorm).
#pragma once

#include "kernels/leaves.h"

namespace shardlab::kernels {

/// F. Shapes: x[rows,width], gamma[width], beta[width] (LayerNorm; unused with rms) -> y[rows,width],
/// stats[rows,2] (mean, 1/std) or, with rms, stats[rows,1] (1/rms). y may be x. Flops: 8 rows width. Bytes: 8 rows width.
struct NormForward {
  const float* x = nullptr;
  const float* gamma = nullptr;
  const float* beta = nullptr;
  float* y = nullptr;
  float* stats = nullptr;
  int64_t rows = 0, width = 0;
  float epsilon = 1e-5f;
  bool rms = false;
};

/// I. Shapes: dy, x[rows,width], gamma[width], stats, residual[rows,width] or null -> dx[rows,width]; dx may be dy or residual.
/// Flops: 11 rows width. Bytes: 12 rows width (16 with residual).
struct NormInput {
  const float* dy = nullptr;
  const float* x = nullptr;
  const float* gamma = nullptr;
  const float* stats = nullptr;
  const float* residual = nullptr;
  float* dx = nullptr;
  int64_t rows = 0, width = 0;
  bool rms = false;
};

/// W. Shapes: dy, x[rows,width], stats -> dgamma[width], dbeta[width] (LayerNorm; unused with rms). rows = tokens.rows().
/// With `accumulate` the result is old + new. Flops: 5 rows width. Bytes: 8 rows width.
struct NormWeight {
  const float* dy = nullptr;
  const float* x = nullptr;
  const float* stats = nullptr;
  float* dgamma = nullptr;
  float* dbeta = nullptr;
  Tokens tokens;
  int64_t width = 0;
  bool rms = false;
  bool accumulate = false;
};

}  // namespace shardlab::kernels
