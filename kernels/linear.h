// Linear: y = x w^T + bias, with w [out, in] row-major.
#pragma once

#include "kernels/leaves.h"

namespace shardlab::kernels {

/// F. Shapes: x[rows,in], w[out,in], bias[out] or null -> y[rows,out].
/// Flops: 2 rows in out. Bytes: 4 (rows in + in out + rows out).
/// Order: fast mode: oneDNN's own (`dnnl_sgemm`), not reproducible across shapes. Canonical: docs/canonical-order.md.
/// Threads: fast mode uses the calling thread's OpenMP setting (omp_set_num_threads in the rank's thread); canonical mode uses one.
struct LinearForward {
  const float* x = nullptr;
  const float* w = nullptr;
  const float* bias = nullptr;
  float* y = nullptr;
  int64_t rows = 0, in = 0, out = 0;
  Part in_part;  ///< which part of the logical contraction extent `in` is (canonical mode)
  bool canonical = false;
  void* scratch = nullptr;  ///< linear_scratch_bytes(...) bytes, aligned to 64; null in fast mode
};

/// I. Shapes: dy[rows,out], w[out,in] -> dx[rows,in]. Flops, threads: as F. The contraction extent is `out`.
struct LinearInput {
  const float* dy = nullptr;
  const float* w = nullptr;
  float* dx = nullptr;
  int64_t rows = 0, in = 0, out = 0;
  Part out_part;  ///< which part of the logical contraction extent `out` is (canonical mode)
  bool canonical = false;
  void* scratch = nullptr;  ///< as LinearForward
};

/// W. Shapes: x[rows,in], dy[rows,out] -> dw[out,in], dbias[out] or null. rows = tokens.rows(). Flops: 2 rows in out.
/// `accumulate` adds to the values that dw and dbias hold. Canonical mode refuses it (a check): there the plan accumulates by Add
/// ops, since the sum over micro-batches is a tree. dbias is in the canonical order in both modes.
struct LinearWeight {
  const float* x = nullptr;
  const float* dy = nullptr;
  float* dw = nullptr;
  float* dbias = nullptr;
  Tokens tokens;
  int64_t in = 0, out = 0;
  bool accumulate = false;
  bool canonical = false;
  void* scratch = nullptr;  ///< as LinearForward
};

/// Scratch in bytes, 0 in fast mode. Canonical: packed panels of at most `contraction extent * 64 + 2^18` floats and a tile.
int64_t linear_scratch_bytes(const LinearForward& a);
int64_t linear_scratch_bytes(const LinearInput& a);
int64_t linear_scratch_bytes(const LinearWeight& a);

}  // namespace shardlab::kernels
