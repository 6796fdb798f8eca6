#pragma once

namespace shardlab::strategies {
struct Draft;

/// See tied_embeddings.cpp. Each does nothing when the other's place is the right one.
void tie_before_reduction(Draft& draft);
void tie_after_reduction(Draft& draft);

}  // namespace shardlab::strategies
