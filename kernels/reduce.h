// Sums of buffers: elementwise joins, the combination steps of collectives, and scalar totals.
#pragma once

#include <cstdint>

namespace shardlab::kernels {

/// c[n] = a[n] + b[n]; c may be a or b. Bytes: 12n. Ring collectives use it with c = a.
struct Add {
  const float* a = nullptr;
  const float* b = nullptr;
  float* c = nullptr;
  int64_t n = 0;
};

/// out[n] = tree over parts 0 .. count-1, elementwise (docs/canonical-order.md: sums over ranks). out may be one of the parts.
/// Bytes: 4 (count + 1) n.
struct TreeCombine {
  const float* const* parts = nullptr;
  int count = 0;
  float* out = nullptr;
  int64_t n = 0;
};

/// total = (tree over all elements of all parts, in order) * (float)((double)factor_num / factor_den). No parts: +0.
struct SumScalars {
  const float* const* parts = nullptr;
  const int64_t* sizes = nullptr;  ///< elements of each part
  int count = 0;
  int64_t factor_num = 1, factor_den = 1;
  float* total = nullptr;
};

}  // namespace shardlab::kernels
