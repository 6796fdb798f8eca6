// How a back end reads an op's operands: what of a logical tensor a rank holds.
#pragma once

#include "kernels/leaves.h"
#include "plan/base/check.h"
#include "runtime/backend.h"

namespace shardlab::runtime {

/// The part of a logical dim that a rank holds.
inline kernels::Part part_of(const BoundOp& op, const Type& type, int dim) {
  return {logical_origin(type, op.mesh(), op.at)[dim], logical_shape(type, op.mesh())[dim]};
}

/// Rows of an activation: [b,s,width], or [rows,width] as one sequence.
inline kernels::Tokens tokens_of(const BoundOp& op, const Type& type) {
  const Shape& shape = type.shape;
  if (shape.rank >= 3) return {shape[0], shape[1], part_of(op, type, 1)};
  return {1, shape.elements() / shape.last(), {}};
}

/// The tensor number in the random keys of a dropout: four sites a layer; the embedding's, of layer -1, come first.
inline uint32_t dropout_tensor(int layer, int site) { return static_cast<uint32_t>((layer + 1) * 4 + site); }

/// An accumulating op adds to its write, so the write must lie where the old value lies.
inline void check_in_place(const BoundOp& op, const Tensor& write, const Tensor& old) {
  SHARDLAB_CHECK(write.data == old.data, "`{}` writes beside what it should update in place", describe(*op.plan, *op.instruction));
}

}  // namespace shardlab::runtime
