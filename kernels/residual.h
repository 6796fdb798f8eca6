// Residual connection and the bias of the projection before it.
#pragma once

#include "kernels/leaves.h"

namespace shardlab::kernels {

/// F. Shapes: x, z[rows,width], bias[width] or null -> y = x + (z + bias); y may be x or z. Bytes: 12 rows width.
struct ResidualForward {
  const float* x = nullptr;
  const float* z = nullptr;
  const float* bias = nullptr;
  float* y = nullptr;
  int64_t rows = 0, width = 0;
};

/// W. Shapes: dy[rows,width] -> dbias[width], the sum over tokens; rows = tokens.rows(). With `accumulate`: old + new.
/// Bytes: 4 rows width.
struct BiasWeight {
  const float* dy = nullptr;
  float* dbias = nullptr;
  Tokens tokens;
  int64_t width = 0;
  bool accumulate = false;
};

}  // namespace shardlab::kernels
