#pragma once

namespace shardlab::strategies {

struct Draft;

/// After the pass of a ZeRO stage. Nothing where nothing is trained.
void hybrid_shard(Draft& draft);

}  // namespace shardlab::strategies
