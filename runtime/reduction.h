// Combining the parts of several ranks, in every element type that is reduced.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/kernels.h"
#include "plan/base/dtype.h"
#include "plan/op.h"

namespace shardlab::runtime {

/// Whether `combine` and `tree_combine` know the type.
bool reducible(DType dtype);

/// own[n] = own + theirs, or the larger of the two. bf16 and f16 are joined in fp32 and rounded: once a hop of a ring.
void combine(const kernels::Kernels& kernels, DType dtype, ReduceOp reduce, void* own, const void* theirs, int64_t n);

/// out[n] = the canonical tree over `parts` in order (plan/base/tree.h), or the largest. `out` may be one of the parts. bf16 and
/// f16: the tree in fp32, rounded once.
void tree_combine(const kernels::Kernels& kernels, DType dtype, ReduceOp reduce, std::span<const void* const> parts, void* out,
                  int64_t n);

/// row[n] = weight * row. bf16 and f16: the product in fp32, rounded once.
void weigh(const kernels::Kernels& kernels, DType dtype, float weight, void* row, int64_t n);

}  // namespace shardlab::runtime
