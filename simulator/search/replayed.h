// Reserved bytes of ranked layouts by the replay of their allocations, which a search of millions of points has no time for.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "simulator/memory/replay.h"
#include "simulator/search/search.h"

namespace shardlab::simulator::search {

/// Replays the caching allocator on every stage of a layout. Stages and layouts that allocate alike are replayed once.
class Replays {
 public:
  /// `studies` as for `search`; `capacity_bytes` of a device, 0: no end.
  Replays(std::span<const Study> studies, int64_t capacity_bytes);

  /// Gives the candidate's estimate the bytes of the stage that then needs most; where the profile has an arena nothing changes.
  void replay(Candidate& candidate);

 private:
  int64_t fragmented(size_t study, const Point& point, int32_t stage, const analytic::MemoryBytes& memory);

  std::span<const Study> studies_;
  int64_t capacity_bytes_;
  std::vector<analytic::Estimator> estimators_;
  std::unordered_map<uint64_t, whatif::Replayed> known_;  ///< by a hash of the allocations and of the room for them
};

/// Replays each candidate. Candidates that no longer fit are taken out, in order, and returned.
std::vector<Candidate> replay_allocations(std::vector<Candidate>& candidates, std::span<const Study> studies,
                                          int64_t capacity_bytes);

/// What a search found, with allocations replayed: as many layouts as were asked for, where there are so many.
struct Ranked {
  Found found;                     ///< `best` and `tight` by their verdicts after the replay
  std::vector<Candidate> misfits;  ///< were estimated to fit, and do not
};

/// Searches, replays in the order of the ranking, and searches again for more where layouts turned out not to fit.
Ranked rank(std::span<const Study> studies, const Space& space, const Options& options, Watcher* watcher = nullptr);

}  // namespace shardlab::simulator::search
