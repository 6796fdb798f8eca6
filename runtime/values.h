// Buffers as fp32 values, whatever their floating-point storage. Counts (i32) are exact below 2^24, codes (u8) always.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <span>
#include <vector>

#include "kernels/kernels.h"
#include "kernels/storage.h"
#include "plan/base/check.h"
#include "plan/base/dtype.h"

namespace shardlab::runtime {

/// n elements of a floating-point storage type, widened exactly, or counts, or codes.
inline std::vector<float> read_values(const void* data, DType dtype, int64_t n) {
  std::vector<float> values(static_cast<size_t>(n));
  if (dtype == DType::i32) {
    const auto* counts = static_cast<const int32_t*>(data);
    for (size_t i = 0; i < values.size(); ++i) {
      SHARDLAB_CHECK(std::abs(int64_t{counts[i]}) <= int64_t{1} << 24, "a count of {} is no fp32", counts[i]);
      values[i] = static_cast<float>(counts[i]);
    }
    return values;
  }
  if (dtype == DType::u8) {
    const auto* codes = static_cast<const uint8_t*>(data);
    for (size_t i = 0; i < values.size(); ++i) values[i] = codes[i];
    return values;
  }
  kernels::storage_kernels(kernels::kernels_for_this_processor()).widen({data, dtype, n, values.data()});
  return values;
}

/// Stores values, rounded to nearest even where their type is narrower than f32.
inline void write_values(std::span<const float> values, DType dtype, void* data) {
  if (dtype == DType::i32) {
    for (size_t i = 0; i < values.size(); ++i) static_cast<int32_t*>(data)[i] = static_cast<int32_t>(values[i]);
    return;
  }
  if (dtype == DType::u8) {
    for (size_t i = 0; i < values.size(); ++i) static_cast<uint8_t*>(data)[i] = static_cast<uint8_t>(values[i]);
    return;
  }
  kernels::storage_kernels(kernels::kernels_for_this_processor())
      .narrow({values.data(), static_cast<int64_t>(values.size()), dtype, data});
}

}  // namespace shardlab::runtime
