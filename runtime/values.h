// Buffers as fp32 values, whatever their floating-point storage.
#pragma once

#include <span>
#include <vector>

#include "kernels/kernels.h"
#include "kernels/storage.h"
#include "plan/type.h"

namespace shardlab {

/// The elements of a buffer of a floating-point storage type, widened exactly.
inline std::vector<float> read_values(const void* data, const Type& type) {
  std::vector<float> values(static_cast<size_t>(type.shape.elements()));
  storage_kernels(kernels_for_this_processor()).widen({data, type.dtype, type.shape.elements(), values.data()});
  return values;
}

/// Stores values in a buffer, rounded to nearest even where its type is narrower.
inline void write_values(std::span<const float> values, const Type& type, void* data) {
  storage_kernels(kernels_for_this_processor()).narrow({values.data(), type.shape.elements(), type.dtype, data});
}

}  // namespace shardlab
