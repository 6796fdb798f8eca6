#include "simulator/estimator/search/replayed.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "plan/base/check.h"
#include "plan/base/hash.h"
#include "simulator/estimator/search/front.h"
#include "simulator/estimator/search/losers.h"

namespace shardlab::simulator::search {
namespace {

using analytic::AllocationEvent;
using analytic::MemoryBytes;
using analytic::MemoryPart;
using whatif::Verdict;

uint64_t hash_of(std::span<const AllocationEvent> events, int64_t room) {
  // A ranking of thousands hashes a hundred million events: the next waits for one multiplication alone.
  uint64_t hash = mix(static_cast<uint64_t>(room));
  for (const AllocationEvent& e : events) {
    const uint64_t which = (static_cast<uint64_t>(e.tensor) << 8) + static_cast<uint64_t>(e.stream);
    hash = std::rotl(hash ^ mix(which) ^ static_cast<uint64_t>(e.bytes), 29) * 0x9e3779b97f4a7c15ull;
  }
  return mix(hash);
}

}  // namespace

Replays::Replays(std::span<const Study> studies, int64_t capacity_bytes, Lower lower)
    : studies_(studies), capacity_bytes_(capacity_bytes), lower_(std::move(lower)) {
  for (const Study& study : studies) estimators_.emplace_back(study.prepared);
}

int64_t Replays::fragmented(size_t study, const Point& point, int32_t stage, const MemoryBytes& memory) {
  const analytic::Prepared& prepared = studies_[study].prepared;
  const std::vector<AllocationEvent> events = allocation_events(prepared, point, stage);
  if (events.empty()) return 0;
  const int64_t room = whatif::room_for_allocator(memory, capacity_bytes_);
  const auto [at, fresh] = known_.try_emplace(hash_of(events, room));
  if (fresh) at->second = whatif::replay(events, {.expandable_segments = prepared.profile().memory.expandable, .capacity = room});
  return whatif::fragmented_bytes(at->second, memory, room);
}

void Replays::replay(Candidate& c) {
  size_t study = 0;
  while (studies_[study].devices != c.point.world_size()) ++study;
  analytic::Estimator& estimator = estimators_[study];
  const analytic::FrameworkProfile& profile = studies_[study].prepared.profile();
  if (const Case* config = lower_ ? estimator.executed(c.point) : nullptr; config != nullptr) {
    const auto known = std::ranges::find(planned_, c.point, &Candidate::point);
    if (known == planned_.end()) {
      const auto plan = CasePlan::of(*config, lower_);
      SHARDLAB_CHECK(plan.ok(), "{}", to_string(plan.error()));
      tell_bytes(profile, *plan, c.estimate);
      planned_.push_back(c);
    } else {
      c.estimate = known->estimate;
    }
    return;
  }
  if (!profile.memory.caching) return;
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
  Ranker(std::span<const Study> studies, const Options& options)
      : options_(options), replays_(studies, options.capacity_bytes, options.lower) {}

  /// Takes layouts of a search until there are enough, or `all`. The ranking begins with the layouts of the search before.
  void take(const Found& found, bool all) {
    for (; best_done_ < found.best.size() && (all || !enough()); ++best_done_) {
      const size_t tight = tight_.size();
      sort_in(found.best[best_done_]);
      if (tight_.size() > tight) turned_tight_.push_back(tight_.back());
    }
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
    found.front = options_.lower ? undominated(front) : std::move(front);
    const auto first = [&](const Candidate& a, const Candidate& b) { return better(options_.objective, a, b); };
    std::ranges::stable_sort(best_, first), std::ranges::stable_sort(tight_, first);
    // Where there is not enough that fits, what may fit stands below it.
    const size_t missing = static_cast<size_t>(options_.top) - std::min(best_.size(), static_cast<size_t>(options_.top));
    const size_t listed = std::min(missing, tight_.size());
    const bool none = best_.empty();
    best_.insert(best_.end(), tight_.begin(), tight_.begin() + static_cast<std::ptrdiff_t>(listed));
    if (none) tight_.clear();
    for (size_t i = static_cast<size_t>(options_.top); i < best_.size(); ++i)
      count_loser(found.losers, beaten_by(best_.front(), best_[i], options_.objective));
    best_.resize(std::min(best_.size(), static_cast<size_t>(options_.top)));
    for (const Candidate& c : turned_tight_)  // the search itself had them among what fits
      count_loser(found.losers,
                  {.loss = Loss::kTight, .points = 1, .nearest = c.point, .seconds = c.seconds(), .bytes = c.bytes()});
    for (Loser& l : found.losers)
      if (l.loss == Loss::kTight) l.points -= std::min(l.points, static_cast<int64_t>(listed));
    std::erase_if(found.losers, [](const Loser& l) { return l.points == 0; });
    found.best = std::move(best_), found.tight = std::move(tight_);
    return {std::move(found), std::move(misfits_)};
  }

 private:
  /// The Pareto front of `front` and the ranked layouts together: bytes of plans may change who beats whom.
  std::vector<Candidate> undominated(std::span<const Candidate> front) const {
    std::vector<Front> each;
    for (const std::span<const Candidate> list : {front, std::span<const Candidate>(best_)})
      for (const Candidate& c : list)
        if (std::ranges::none_of(each, [&](const Front& f) { return f.members().begin()->second.point == c.point; }))
          each.emplace_back().add(c);
    return joined(each);
  }
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
  std::vector<Candidate> turned_tight_;  ///< by their replay
  size_t best_done_ = 0;
};

Ranked rank_within(std::span<const Study> studies, const Space& space, const Options& options, Watcher* watcher) {
  Ranker ranker(studies, options);
  Options wider = options;
  const bool by_plan_bytes = options.lower && options.objective == Objective::kMemory;
  if (options.lower) {  // verdicts are of plans: no estimate is tight
    wider.capacity_bytes = static_cast<int64_t>(static_cast<double>(options.capacity_bytes) * (1 + analytic::kPlanEstimateError));
    wider.reserved_error = 0, wider.margin_bytes = 0;
    if (by_plan_bytes) wider.top = 2 * options.top;  // plans order bytes otherwise than estimates
  }
  for (;;) {
    Found found = search(studies, space, wider, watcher);
    ranker.take(found, by_plan_bytes);
    const bool all = std::ssize(found.best) < wider.top;  // there are no more
    if (all || found.stopped || ranker.enough()) return ranker.ranked(std::move(found));
    wider.top = std::max(wider.top + 1, options.top + ranker.misfits() + ranker.misfits() / 4);
  }
}

/// Looks once more, without the limit that nothing keeps.
void find_nearest(std::span<const Study> studies, const Space& space, const Options& options, Watcher* watcher, Found& found) {
  Options wider = options;
  wider.top = 1;
  const auto look = [&](Loss loss, Objective objective) {
    wider.objective = objective;
    const Ranked again = rank_within(studies, space, wider, watcher);
    if (again.found.best.empty()) return false;
    found.nearest = again.found.best.front(), found.nearest_loss = loss;
    return true;
  };
  if (std::exchange(wider.most_s, 0) > 0 && look(Loss::kLate, Objective::kTime)) return;
  if (std::exchange(wider.capacity_bytes, 0) > 0) look(Loss::kTooLarge, Objective::kMemory);
}

}  // namespace

Ranked rank(std::span<const Study> studies, const Space& space, const Options& options, Watcher* watcher) {
  Ranked ranked = rank_within(studies, space, options, watcher);
  Found& found = ranked.found;
  if (found.best.empty() && !found.stopped && found.counts.refused < found.counts.points)
    find_nearest(studies, space, options, watcher, found);
  return ranked;
}

}  // namespace shardlab::simulator::search
