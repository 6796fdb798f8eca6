#pragma once

namespace shardlab::strategies {
struct Draft;

/// See mirrored_stages.cpp.
void reduce_over_mirrors(Draft& draft);

}  // namespace shardlab::strategies
