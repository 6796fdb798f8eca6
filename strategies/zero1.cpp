// ZeRO stage 1 (distributed optimizer): every data-parallel rank keeps the optimizer state of 1/N of the parameters.
//
// Gradients and parameters live in flat buckets padded to a multiple of N. A bucket's gradients are reduce-scattered: each rank
// gets the sum for its slice, updates that slice of the parameters with its slice of the moments, and an all-gather makes the
// parameters whole again. With `compression` bf16 or int8 the reduce-scatter is one of codes (quantised_scatter.cpp).
//
// Shapes   bucket[n], slices [n/N]
// Adds     reduce-scatter of the gradients and all-gather of the parameters: Psi (N-1)/N each, together what data parallelism sends
// Memory   moments 1/N
// Refuses  dp = 1
// Paper    Rajbhandari et al., "ZeRO" (2020), section 5.1
#include "strategies/zero1.h"

#include "strategies/mirrored_stages.h"
#include "strategies/shards.h"
#include "strategies/zero_plus_plus.h"

namespace shardlab::strategies {

void update_slices(Draft& draft, StageDraft& stage, Shards& shards) {
  for (const Bucket& bucket : stage.buckets) {
    if (shards.shares_values(bucket)) continue;
    const BufferId values = shards.flat_values(bucket, true);
    Update update;
    update.unit = bucket.last_unit;
    update.gradient = bucket.reduced;
    update.value = shards.slice_of(values, bucket.name + ".value.shard");
    update.decay = bucket.decay;
    if (draft.plan.mesh.size(shards.axes_of(stage.role.buffers[values.index()].type)) > 1)
      update.after = shards.gather(bucket, update.value, values, reduction_stream(draft));
    stage.updates.push_back(std::move(update));
  }
}

void zero1(Draft& draft) {
  for (StageDraft& stage : draft.stages) {
    Shards shards(draft, stage, "zero-1");
    fill_buckets(draft, stage,
                 {.multiple = shards.ranks(), .block = code_block(draft.config), .bytes = draft.config.layout.bucket_bytes});
    sum_buckets_over_mirrors(draft, stage);
    for (Bucket& bucket : stage.buckets) bucket.reduced = shards.slice_of(bucket.gradient, bucket.name + ".sum");
    if (const ScatterEvent scatter = compressed_scatter(draft, stage, shards)) {
      const int last = draft.micro_batches() - 1;
      when_complete(draft, stage, [&](Bucket& bucket) { return scatter(bucket, bucket.reduced, last); });
    } else {
      reduce_when_complete(draft, stage, CollectiveKind::kReduceScatter, "zero-1");
    }
    update_slices(draft, stage, shards);
  }
}

}  // namespace shardlab::strategies
