// What a case's precision means for storage: one place for strategies and closed forms to read it.
#pragma once

#include <string_view>

#include "plan/base/dtype.h"
#include "plan/case.h"

namespace shardlab {

/// The element type that a key's value names: "bf16". fp32 for every other word.
constexpr DType float_named(std::string_view word) {
  return word == "bf16" ? DType::bf16 : word == "fp16" ? DType::f16 : DType::f32;
}

/// Element types of the state and the activations.
struct Precision {
  DType compute = DType::f32;   ///< parameters as they compute, activations and their gradients
  DType gradient = DType::f32;  ///< of parameters: as they accumulate and as they travel
  /// Whether the optimizer keeps an fp32 copy of every parameter, which it updates.
  bool has_master() const { return compute != DType::f32; }
};

inline Precision precision_of(const Case& c) {
  const std::string& gradient = c.train.accumulate_dtype.empty() ? c.train.reduce_dtype : c.train.accumulate_dtype;
  return {float_named(c.train.precision), float_named(gradient)};
}

}  // namespace shardlab
