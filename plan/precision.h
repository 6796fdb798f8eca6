// What a case's precision means for storage: one place for strategies and closed forms to read it.
#pragma once

#include <string_view>

#include "plan/base/dtype.h"
#include "plan/case.h"

namespace shardlab {

/// Whether a matrix product's factors of this type are followed by their scales.
constexpr bool has_scales(DType factor) { return factor == DType::f8e4m3 || factor == DType::f8e5m2; }

/// The element type that a key's value names: "bf16". fp32 for every other word.
constexpr DType float_named(std::string_view word) {
  return word == "bf16" ? DType::bf16 : word == "fp16" ? DType::f16 : DType::f32;
}

/// Element types of the state and the activations.
struct ElementTypes {
  DType compute = DType::f32;   ///< parameters as they compute, activations and their gradients
  DType gradient = DType::f32;  ///< of parameters: as they accumulate and as they travel
  /// Whether the optimizer keeps an fp32 copy of every parameter, which it updates.
  bool has_master() const { return compute != DType::f32; }
};

/// Whether the layers' matrix products take fp8 factors.
inline bool multiplies_in_fp8(const Case& c) { return c.train.precision == Precision::kFp8; }

/// Steps whose largest size a delayed scale is for (Transformer Engine's `amax_history_len`; its margin is 0, as here).
inline constexpr int64_t kFp8Window = 16;

inline ElementTypes element_types(const Case& c) {
  const std::string& gradient = c.train.accumulate_dtype.empty() ? c.train.reduce_dtype : c.train.accumulate_dtype;
  // fp8 is how matrix products take their factors (strategies/fp8.cpp); all else is bf16 then.
  const DType compute = multiplies_in_fp8(c) ? DType::bf16 : float_named(name_of(c.train.precision));
  return {compute, float_named(gradient)};
}

}  // namespace shardlab
