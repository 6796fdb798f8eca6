#pragma once

namespace shardlab::strategies {

struct Draft;
struct StageDraft;
class Shards;

void zero1(Draft& draft);

/// One update a bucket: of this rank's slice of the values, which are then gathered.
void update_slices(Draft& draft, StageDraft& stage, Shards& shards);

}  // namespace shardlab::strategies
