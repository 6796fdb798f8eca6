#pragma once

#include <cstddef>
#include <vector>

#include "strategies/draft.h"

namespace shardlab::strategies {

void expert_overlap(Draft& draft);

/// The piece of each op of a segment that is cut where it waits: a piece ends before the first op of the compute stream that reads what a
/// collective of another stream brings. One piece, 0, where nothing is waited for.
std::vector<size_t> pieces_by_exchange(const Segment& segment);

}  // namespace shardlab::strategies
