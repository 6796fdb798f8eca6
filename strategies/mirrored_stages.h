// Gradients of parts that lie on two stages each.
#pragma once

#include "strategies/draft.h"

namespace shardlab::strategies {

/// Whether each part of the model lies on a stage and on its mirror image.
bool has_mirrored_stages(const Draft& draft);

/// Adds up each bucket's gradients, whole, over the two stages; `Bucket::gradient`, and what its members are read as, is then the
/// sum. Before data-parallel ranks reduce it.
void sum_buckets_over_mirrors(Draft& draft, StageDraft& stage);

/// Adds up the slices that each rank has of the reduced gradients over the two stages.
void sum_slices_over_mirrors(Draft& draft);

/// The sum of one number over a stage and its mirror image.
BufferId sum_scalar_over_mirrors(Draft& draft, StageDraft& stage, BufferId part);

/// The sum over a stage and its mirror image of the tokens that went to each expert of their layers.
BufferId sum_loads_over_mirrors(Draft& draft, StageDraft& stage, BufferId part);

/// Whether a stage counts the gradients of a unit in the norm: those of a part that lies on two stages are counted by the stage
/// that takes it on the way down.
bool counts_in_norm(const Draft& draft, const StageDraft& stage, int unit);

}  // namespace shardlab::strategies
