#include "plan/base/check.h"
#include "runtime/backend.h"

namespace shardlab::runtime {

namespace {

/// The axes along which dim 0, the sequences, is cut over ranks: the data-parallel ones. Workers that train apart along them each
/// have their own part too (strategies/diloco.cpp); along the pipeline's, what is a stage's own is of the same sequences.
AxisSet sequence_axes(const Type& type, const Mesh& mesh) {
  AxisSet axes;
  for (size_t i = 0; i < mesh.axes.size(); ++i)
    if ((type.place[i].is_shard() && type.place[i].dim == 0) || (type.place[i].kind == Place::kLocal && mesh.axes[i].name != "pp"))
      axes = axes | AxisSet::of(static_cast<int>(i));
  return axes;
}

}  // namespace

int64_t BoundOp::first_sequence(const Type& type) const {
  SHARDLAB_CHECK(instruction->micro_batch >= 0, "`{}` works for no micro-batch", describe(*plan, *instruction));
  const AxisSet axes = sequence_axes(type, mesh());
  const AxisSet inner{static_cast<uint8_t>(axes.mask & plan->together.mask)}, outer{static_cast<uint8_t>(axes.mask & ~inner.mask)};
  const int64_t block = mesh().index_in_group(outer, at) * int64_t{plan->micro_batches} + instruction->micro_batch;
  return (block * mesh().size(inner) + mesh().index_in_group(inner, at)) * type.shape[0];
}

int64_t BoundOp::sequences_per_step(const Type& type) const {
  return int64_t{mesh().size(sequence_axes(type, mesh()))} * plan->micro_batches * type.shape[0];
}

}  // namespace shardlab::runtime
