#include "simulator/estimator/search/losers.h"

#include <fmt/format.h>

#include <algorithm>

namespace shardlab::simulator::search {
namespace {

using analytic::kMemoryParts;
using analytic::kRefusals;
using analytic::kTimeParts;

// Classes in one array: refusals, then these, then parts of time, then of memory.
constexpr size_t kUndividedAt = kRefusals, kTooLargeAt = kRefusals + 1, kBoundedAt = kRefusals + 2;
constexpr size_t kTightAt = kRefusals + 3, kLateAt = kRefusals + 4, kTimesAt = kRefusals + 5, kMemoriesAt = kTimesAt + kTimeParts;

/// Index of the part in which `mine` exceeds `theirs` most.
template <class Parts>
size_t largest_excess(const Parts& mine, double scale, const Parts& theirs, double their_scale) {
  size_t most = 0;
  double excess = 0;
  for (size_t i = 0; i < mine.size(); ++i) {
    const double d = scale * static_cast<double>(mine[i]) - their_scale * static_cast<double>(theirs[i]);
    if (i == 0 || d > excess) most = i, excess = d;
  }
  return most;
}

}  // namespace

Loser beaten_by(const Candidate& best, const Candidate& c, Objective objective) {
  Loser loser{.points = 1, .nearest = c.point, .seconds = c.seconds(), .bytes = c.bytes()};
  if (objective == Objective::kMemory) {
    loser.loss = Loss::kLarger;
    loser.memory = static_cast<analytic::MemoryPart>(largest_excess(c.estimate.memory.bytes, 1, best.estimate.memory.bytes, 1));
    return loser;
  }
  const double mine = objective == Objective::kCost ? static_cast<double>(c.point.world_size()) : 1;
  const double theirs = objective == Objective::kCost ? static_cast<double>(best.point.world_size()) : 1;
  loser.loss = Loss::kSlower;
  loser.costs_more = objective == Objective::kCost;
  loser.time = static_cast<analytic::TimePart>(largest_excess(c.estimate.parts, mine, best.estimate.parts, theirs));
  return loser;
}

void count_loser(std::vector<Loser>& list, const Loser& loser) {
  const auto same = std::ranges::find_if(list, [&](const Loser& l) { return l.reason() == loser.reason(); });
  if (same == list.end())
    list.push_back(loser);
  else
    same->points += loser.points;
}

int distance(const Point& a, const Point& b) {
  const bool differs[] = {a.dp != b.dp,
                          a.tp != b.tp,
                          a.pp != b.pp,
                          a.vpp != b.vpp,
                          a.cp != b.cp,
                          a.ep != b.ep,
                          a.expert_tp != b.expert_tp,
                          a.zero != b.zero,
                          a.hybrid_shard != b.hybrid_shard,
                          a.schedule != b.schedule,
                          a.sequence_parallel != b.sequence_parallel,
                          a.cp > 1 && b.cp > 1 && a.cp_kind != b.cp_kind,
                          a.recompute != b.recompute,
                          a.offload_activations != b.offload_activations,
                          a.offload_optimizer != b.offload_optimizer,
                          a.offload_parameters != b.offload_parameters,
                          a.micro_batch != b.micro_batch,
                          a.algorithm != b.algorithm,
                          a.bucket_bytes != b.bucket_bytes};
  return static_cast<int>(std::count(std::begin(differs), std::end(differs), true));
}

std::string Loser::reason() const {
  switch (loss) {
    case Loss::kIllegal: return fmt::format("no layout: {}", analytic::sentence_of(refusal));
    case Loss::kUndivided: return "no layout: dp does not divide the sequences of a step";
    case Loss::kTooLarge: return "does not fit";
    case Loss::kTight: return "may not fit";
    case Loss::kLate: return "takes longer than allowed";
    case Loss::kSlower: return fmt::format("{}: {}", costs_more ? "dearer" : "slower", analytic::sentence_of(time));
    case Loss::kLarger: return fmt::format("larger: more {}", analytic::words_of(memory));
    case Loss::kBounded: return fmt::format("{} or larger, by a lower bound", costs_more ? "dearer" : "slower");
  }
  return {};
}

Losers::Entry& Losers::count(size_t index, Loss loss, int64_t points) {
  Entry& entry = entries_[index];
  entry.loser.loss = loss;
  entry.loser.points += points;
  return entry;
}

void Losers::nearer_to_best(Entry& entry, const Point& example) {
  const int d = have_best_ ? distance(example, best_) : 0;
  if (entry.distance < 0 || d < entry.distance) entry.loser.nearest = example, entry.distance = d;
}

void Losers::illegal(analytic::Refusal refusal, int64_t points, const Point& example) {
  Entry& entry = count(static_cast<size_t>(refusal), Loss::kIllegal, points);
  entry.loser.refusal = refusal;
  nearer_to_best(entry, example);
}

void Losers::undivided(const Point& example) { nearer_to_best(count(kUndividedAt, Loss::kUndivided, 1), example); }

void Losers::too_large(int64_t points, const Point& example, int64_t bytes, bool is_bound) {
  Loser& loser = count(kTooLargeAt, Loss::kTooLarge, points).loser;
  if (loser.bytes == 0 || bytes < loser.bytes) loser.nearest = example, loser.bytes = bytes, loser.is_bound = is_bound;
}

void Losers::bounded(int64_t points, const Point& example, double least_s) {
  Loser& loser = count(kBoundedAt, Loss::kBounded, points).loser;
  if (loser.seconds == 0 || least_s < loser.seconds) loser.nearest = example, loser.seconds = least_s;
  loser.is_bound = true, loser.costs_more = objective_ == Objective::kCost;
}

/// Takes the layout as the example if it is better in the objective.
void Losers::nearer_to_first(Loser& loser, const Candidate& c) {
  const bool closer = objective_ == Objective::kMemory ? c.bytes() < loser.bytes
                      : objective_ == Objective::kCost
                          ? c.device_seconds() < loser.seconds * static_cast<double>(loser.nearest.world_size())
                          : c.seconds() < loser.seconds;
  if (loser.seconds != 0 && !closer) return;
  loser.nearest = c.point, loser.seconds = c.seconds(), loser.bytes = c.bytes();
}

void Losers::late(int64_t points, const Point& example, double seconds, bool is_bound) {
  Loser& loser = count(kLateAt, Loss::kLate, points).loser;
  if (loser.seconds == 0 || seconds < loser.seconds) loser.nearest = example, loser.seconds = seconds, loser.is_bound = is_bound;
}

void Losers::tight(const Candidate& c) {
  Loser& loser = count(kTightAt, Loss::kTight, 1).loser;
  nearer_to_first(loser, c);
}

void Losers::beaten(const Candidate& c, const Candidate& best) {
  const Loser one = beaten_by(best, c, objective_);
  Loser& loser =
      count(one.loss == Loss::kLarger ? kMemoriesAt + static_cast<size_t>(one.memory) : kTimesAt + static_cast<size_t>(one.time),
            one.loss, 1)
          .loser;
  loser.time = one.time, loser.memory = one.memory, loser.costs_more = one.costs_more;
  nearer_to_first(loser, c);
}

void Losers::new_best(const Point& best) {
  best_ = best, have_best_ = true;
  for (size_t i = 0; i <= kUndividedAt; ++i)
    if (entries_[i].distance >= 0) entries_[i].distance = distance(entries_[i].loser.nearest, best);
}

std::vector<Loser> Losers::list() const {
  std::vector<Loser> all;
  for (const Entry& entry : entries_)
    if (entry.loser.points > 0) all.push_back(entry.loser);
  std::stable_sort(all.begin(), all.end(), [](const Loser& a, const Loser& b) { return a.points > b.points; });
  return all;
}

}  // namespace shardlab::simulator::search
