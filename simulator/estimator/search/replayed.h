// Bytes of ranked layouts: by the replay of their allocations, or, for layouts of shardlab's executor, by their plans. A search of
// millions of points has no time for either.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "simulator/estimator/memory/replay.h"
#include "simulator/estimator/search/search.h"

namespace shardlab::simulator::search {

/// Replays the caching allocator on every stage of a layout, or folds its plan. Stages and layouts that allocate alike are replayed
/// once, and each layout is lowered once.
class Replays {
 public:
  /// `studies` as for `search`; `capacity_bytes` of a device, 0: no end; `lower`, where given, for layouts of shardlab's executor.
  Replays(std::span<const Study> studies, int64_t capacity_bytes, Lower lower = {});

  /// Gives the candidate's estimate the replayed bytes of the stage that then needs most. A candidate of shardlab's executor gets
  /// all bytes of its plan. Under another profile with an arena nothing changes.
  void replay(Candidate& candidate);

 private:
  int64_t fragmented(size_t study, const Point& point, int32_t stage, const analytic::MemoryBytes& memory);

  std::span<const Study> studies_;
  int64_t capacity_bytes_;
  std::vector<analytic::Estimator> estimators_;
  Lower lower_;
  std::unordered_map<uint64_t, whatif::Replayed> known_;  ///< by a hash of the allocations and of the room for them
  std::vector<Candidate> planned_;                        ///< that have the bytes of their plans
};

/// Replays each candidate. Candidates that no longer fit are taken out, in order, and returned.
std::vector<Candidate> replay_allocations(std::vector<Candidate>& candidates, std::span<const Study> studies,
                                          int64_t capacity_bytes);

/// The result of a search with allocations replayed: as many layouts as were asked for, if there are so many.
struct Ranked {
  Found found;                     ///< `best` and `tight` by their verdicts after the replay
  std::vector<Candidate> misfits;  ///< were estimated to fit, and do not
};

/// Searches, replays in the order of the ranking, and searches again for more if layouts turned out not to fit. Under
/// `Options::lower` a layout whose estimate exceeds the capacity by no more than the error of estimates is asked of its plan too.
Ranked rank(std::span<const Study> studies, const Space& space, const Options& options, Watcher* watcher = nullptr);

}  // namespace shardlab::simulator::search
