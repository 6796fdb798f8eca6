// Reserved bytes of ranked layouts by the replay of their allocations, which a search of millions of points has no time for.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "simulator/search/search.h"

namespace shardlab::simulator::search {

/// Replays the caching allocator on every stage of each candidate, and gives its estimate the bytes of the stage that then needs
/// most; where the profile has an arena nothing changes. Candidates that no longer fit in `capacity_bytes` (0: no end) are taken
/// out, in order, and returned. `studies` as for `search`.
std::vector<Candidate> replay_allocations(std::vector<Candidate>& candidates, std::span<const Study> studies,
                                          int64_t capacity_bytes);

}  // namespace shardlab::simulator::search
