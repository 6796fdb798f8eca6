// Buffers as fp32 values, whatever their floating-point storage.
#pragma once

#include <span>
#include <vector>

#include "kernels/kernels.h"
#include "kernels/storage.h"
#include "plan/base/dtype.h"

namespace shardlab {

/// n elements of a floating-point storage type, widened exactly.
inline std::vector<float> read_values(const void* data, DType dtype, int64_t n) {
  std::vector<float> values(static_cast<size_t>(n));
  storage_kernels(kernels_for_this_processor()).widen({data, dtype, n, values.data()});
  return values;
}

/// Stores values, rounded to nearest even where their type is narrower than f32.
inline void write_values(std::span<const float> values, DType dtype, void* data) {
  storage_kernels(kernels_for_this_processor()).narrow({values.data(), static_cast<int64_t>(values.size()), dtype, data});
}

}  // namespace shardlab
