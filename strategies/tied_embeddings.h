#pragma once

namespace shardlab {
struct Case;
}

namespace shardlab::strategies {
struct Draft;

/// Whether the two gradients of a tied table are added before they are reduced: there and then while both are whole, else last.
bool tied_gradients_meet_early(const Case& c);

/// See tied_embeddings.cpp. Each does nothing when the other's place is the right one.
void tie_before_reduction(Draft& draft);
void tie_after_reduction(Draft& draft);

}  // namespace shardlab::strategies
