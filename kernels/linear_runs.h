// Linear, phase W, over rows that lie in several runs: the rows of one expert among those of others.
#pragma once

#include "kernels/kernels.h"

namespace shardlab::kernels {

/// Rows [begin, begin + rows) of a matrix.
struct RowRun {
  int64_t begin = 0, rows = 0;
};

/// W over rows that lie in several runs, in canonical mode: the rows of one expert. The sum is over the runs' rows in order, cut in
/// `leaves` leaves: leaf i has the rows [leaf_ends[i], leaf_ends[i + 1]) of them, and may be empty; leaf_ends[0] is 0.
/// Shapes: x[..,in], dy[..,out] -> dw[out,in].
struct LinearWeightRuns {
  const float* x = nullptr;
  const float* dy = nullptr;
  float* dw = nullptr;
  const RowRun* runs = nullptr;
  int64_t run_count = 0;
  const int64_t* leaf_ends = nullptr;
  int64_t leaves = 0;
  int64_t in = 0, out = 0;
  void* scratch = nullptr;  ///< as a LinearWeight's of as many tokens as there are rows
};

/// By the variant of the processor that `k` is of.
void linear_weight_runs(const Kernels& k, const LinearWeightRuns& a);

}  // namespace shardlab::kernels
