#include "simulator/search/replayed.h"

#include <algorithm>

#include "plan/base/hash.h"
#include "simulator/search/losers.h"

namespace shardlab::simulator::search {
namespace {

using analytic::AllocationEvent;
using analytic::MemoryBytes;
using analytic::MemoryPart;
using whatif::Verdict;

uint64_t hash_of(std::span<const AllocationEvent> events, int64_t room) {
  uint64_t hash = mix(static_cast<uint64_t>(room));
  for (const AllocationEvent& e : events)
    hash = mix(hash ^ static_cast<uint64_t>(e.bytes)) + (static_cast<uint64_t>(e.tensor) << 8) + static_cast<uint64_t>(e.stream);
  return hash;
}

}  // namespace

Replays::Replays(std::span<const Study> studies, int64_t capacity_bytes) : studies_(studies), capacity_bytes_(capacity_bytes) {
  for (const Study& study : studies) estimators_.emplace_back(study.prepared);
}

int64_t Replays::fragmented(size_t study, const Point& point, int32_t stage, const MemoryBytes& memory) {
  const analytic::Prepared& prepared = studies_[study].prepared;
  const std::vector<AllocationEvent> events = allocation_events(prepared, point, stage);
  if (events.empty()) return 0;
  const int64_t room = whatif::room_for_allocator(memory, capacity_bytes_);
  const auto [at, fresh] = known_.try_emplace(hash_of(events, room));
  if (fresh)
    at->second = whatif::replay(events, {.expandable_segments = prepared.profile().memory_expandable, .capacity = room});
  return whatif::fragmented_bytes(at->second, memory, room);
}

void Replays::replay(Candidate& c) {
  size_t study = 0;
  while (studies_[study].devices != c.point.world_size()) ++study;
  analytic::Estimator& estimator = estimators_[study];
  if (!studies_[study].prepared.profile().memory_caching || estimator.exact(c.point)) return;
  MemoryBytes worst;
  for (int32_t stage = 0; stage < c.point.pp; ++stage) {
    MemoryBytes memory = estimator.stage_memory(c.point, stage);
    memory[MemoryPart::kFragmented] = fragmented(study, c.point, stage, memory);
    if (stage > 0 && memory.device() <= worst.device()) continue;
    worst = memory;
    c.estimate.worst_stage = stage;
  }
  c.estimate.memory = worst;
}

std::vector<Candidate> replay_allocations(std::vector<Candidate>& candidates, std::span<const Study> studies,
                                          int64_t capacity_bytes) {
  Replays replays(studies, capacity_bytes);
  for (Candidate& c : candidates) replays.replay(c);
  const auto misfits = std::ranges::stable_partition(
      candidates, [&](const Candidate& c) { return capacity_bytes <= 0 || c.bytes() <= capacity_bytes; });
  std::vector<Candidate> out(misfits.begin(), misfits.end());
  candidates.erase(misfits.begin(), misfits.end());
  return out;
}

namespace {

/// Replays what searches rank, each layout once, however often is searched.
class Ranker {
 public:
  Ranker(std::span<const Study> studies, const Options& options) : options_(options), replays_(studies, options.capacity_bytes) {}

  /// Takes layouts of a search until there are enough. Its ranking begins with those of the search before.
  void take(const Found& found) {
    for (; best_done_ < found.best.size() && !enough(); ++best_done_) sort_in(found.best[best_done_]);
  }
  bool enough() const { return std::ssize(best_) >= options_.top; }
  int32_t misfits() const { return static_cast<int32_t>(misfits_.size() + tight_.size()); }

  Ranked ranked(Found found) {
    for (const Candidate& c : found.tight)
      if (wanted(c)) sort_in(c);
    for (size_t i = best_done_; i < found.best.size(); ++i)  // estimated to fit, and not asked for
      count_loser(found.losers, beaten_by(best_.front(), found.best[i], options_.objective));
    std::vector<Candidate> front;
    for (Candidate& c : found.front) {
      replays_.replay(c);
      const Verdict verdict = verdict_of(c.estimate.memory, options_);
      if (verdict != Verdict::kUnlikely && verdict != Verdict::kNo) front.push_back(c);
    }
    found.front = std::move(front);
    const auto first = [&](const Candidate& a, const Candidate& b) { return better(options_.objective, a, b); };
    std::ranges::stable_sort(best_, first), std::ranges::stable_sort(tight_, first);
    // Where there is not enough that fits, what may fit stands below it.
    const size_t missing = static_cast<size_t>(options_.top) - std::min(best_.size(), static_cast<size_t>(options_.top));
    const size_t listed = std::min(missing, tight_.size());
    const bool none = best_.empty();
    best_.insert(best_.end(), tight_.begin(), tight_.begin() + static_cast<std::ptrdiff_t>(listed));
    if (none) tight_.clear();
    best_.resize(std::min(best_.size(), static_cast<size_t>(options_.top)));
    for (Loser& l : found.losers)
      if (l.loss == Loss::kTight) l.points -= std::min(l.points, static_cast<int64_t>(listed));
    std::erase_if(found.losers, [](const Loser& l) { return l.points == 0; });
    found.best = std::move(best_), found.tight = std::move(tight_);
    return {std::move(found), std::move(misfits_)};
  }

 private:
  /// A tight layout is of interest where there is not enough that fits, or where it is the first to beat all of that.
  bool wanted(const Candidate& c) const {
    if (!enough()) return std::ssize(tight_) < options_.top;
    return tight_.empty() && better(options_.objective, c, best_.front());
  }
  void sort_in(Candidate c) {
    replays_.replay(c);
    const Verdict verdict = verdict_of(c.estimate.memory, options_);
    const bool misfit = verdict == Verdict::kUnlikely || verdict == Verdict::kNo;
    (misfit ? misfits_ : verdict == Verdict::kTight ? tight_ : best_).push_back(std::move(c));
  }

  const Options& options_;
  Replays replays_;
  std::vector<Candidate> best_, tight_, misfits_;
  size_t best_done_ = 0;
};

}  // namespace

Ranked rank(std::span<const Study> studies, const Space& space, const Options& options, Watcher* watcher) {
  Ranker ranker(studies, options);
  Options wider = options;
  for (;;) {
    Found found = search(studies, space, wider, watcher);
    ranker.take(found);
    const bool all = std::ssize(found.best) < wider.top;  // there are no more
    if (all || found.stopped || ranker.enough()) return ranker.ranked(std::move(found));
    wider.top = options.top + ranker.misfits() + ranker.misfits() / 4;
  }
}

}  // namespace shardlab::simulator::search
