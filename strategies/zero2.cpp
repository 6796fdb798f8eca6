// ZeRO stage 2: gradients are sharded too. A bucket of gradients lives only from the first backward that writes to it until it has
// been reduce-scattered; what stays is each rank's slice of the sum. With gradient accumulation every micro-batch is scattered, and
// the slices are added up. Parameters stay whole: the update and the gather are ZeRO-1's, and so is what `compression` changes.
//
// Shapes   bucket[n], slices [n/N]
// Adds     per micro-batch a reduce-scatter of the gradients, Psi (N-1)/N; per step an all-gather of the parameters, Psi (N-1)/N
// Memory   moments and gradients 1/N; the buckets between their first gradient and their scatter; canonical accumulation: up to
//          floor(log2 m) further slices
// Refuses  dp = 1
// Paper    Rajbhandari et al., "ZeRO" (2020), section 5.2
#include "strategies/zero2.h"

#include "strategies/mirrored_stages.h"
#include "strategies/shards.h"
#include "strategies/zero1.h"
#include "strategies/zero_plus_plus.h"

namespace shardlab::strategies {

void zero2(Draft& draft) {
  for (StageDraft& stage : draft.stages) {
    Shards shards(draft, stage, "zero-2");
    fill_buckets(draft, stage,
                 {.multiple = shards.ranks(),
                  .block = code_block(draft.config),
                  .bytes = draft.config.layout.bucket_bytes,
                  .whole_step = false});
    scatter_every_micro_batch(draft, stage, shards, "zero-2", compressed_scatter(draft, stage, shards));
    update_slices(draft, stage, shards);
  }
  sum_slices_over_mirrors(draft);
}

}  // namespace shardlab::strategies
