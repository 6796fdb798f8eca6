// Data parallelism: every rank of a `dp` group has the whole model (or its slice of it) and its own sequences; gradients are summed
// over the group once a step, after the last micro-batch. Context-parallel ranks have parts of sequences: they belong to the group.
//
// Gradients are reduced in buckets: flat buffers of which the parameters' gradients are views, filled in the order in which
// backward finishes them. bucket_bytes 0 gives every parameter a bucket of its own (the naive form). With `overlap` a bucket is
// reduced on a stream of its own as soon as its last gradient is there, while backward goes on; without, all follow
// backward on the compute stream. A bucket holds parameters of one kind: matrices or vectors (they differ in weight
// decay), sliced by tensor parallelism or whole, and a tied table alone.
//
// The loss divides by the number of targets of the whole step, so the sum over ranks is the gradient: no rank averages.
//
// Shapes   buckets are flat
// Adds     all-reduce of every gradient: 2 Psi (N-1)/N elements sent by each rank
// Memory   none: a bucket is where its gradients live
// Refuses  nothing
// Paper    Li et al., "PyTorch Distributed" (2020), section 3.2
#include "strategies/data_parallel.h"

#include "strategies/accumulation.h"
#include "strategies/buckets.h"
#include "strategies/mirrored_stages.h"
#include "strategies/state.h"

namespace shardlab::strategies {

void declare_reduced(Draft& draft, StageDraft& stage, Bucket& bucket) {
  const AxisSet dp = reduction_axes(draft, stage, bucket);
  Buffer sum = stage.role.buffers[bucket.gradient.index()];
  sum.name = bucket.name + ".sum";
  sum.type = placed(sum.type, dp, Placement::replicate());
  if (!sum.view) sum.view = View{bucket.gradient.value, 0, {}};
  bucket.reduced = add_buffer(stage, std::move(sum));
  for (const Bucket::Member& m : bucket.members) {
    ParameterState& state = stage.at(m.unit, m.parameter);
    Buffer piece = stage.role.buffers[state.reduced.index()];
    piece.name = state_name(draft, m.unit, m.parameter) + ".grad.sum";
    piece.type = placed(piece.type, dp, Placement::replicate());
    state.reduced = add_buffer(stage, std::move(piece));
  }
}

void data_parallel(Draft& draft) {
  for (StageDraft& stage : draft.stages) {
    fill_buckets(draft, stage, {.bytes = draft.config.layout.bucket_bytes});
    sum_buckets_over_mirrors(draft, stage);
    for (Bucket& bucket : stage.buckets)
      if (draft.plan.mesh.size(reduction_axes(draft, stage, bucket)) == 1)
        bucket.reduced = bucket.gradient;
      else
        declare_reduced(draft, stage, bucket);
    reduce_when_complete(draft, stage, CollectiveKind::kAllReduce, "data-parallel");
  }
}

}  // namespace shardlab::strategies
