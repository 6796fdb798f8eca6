#pragma once

namespace shardlab::strategies {
struct Draft;

/// See expert_bound.cpp: room for fewer rows of experts than may come.
void bound_experts(Draft& draft);
/// Appends, at the end of backward, the word of all ranks whether more rows came in the step than some rank has room for: the metric
/// `kOverflowed`, and one of `StageDraft::flags`.
void agree_on_overflow(Draft& draft);
}  // namespace shardlab::strategies
