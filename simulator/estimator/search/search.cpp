#include "simulator/estimator/search/search.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "plan/base/check.h"
#include "simulator/estimator/search/front.h"
#include "simulator/estimator/search/losers.h"

namespace shardlab::simulator::search {
namespace {

using analytic::Estimator;
using analytic::Refusal;

constexpr std::string_view kObjectives[] = {"time", "memory", "cost"};

/// All axes of a point, in the order in which equal candidates are told apart.
auto axes(const Point& p) {
  return std::tuple(p.dp, p.tp, p.pp, p.cp, p.ep, p.expert_tp, p.zero, p.hybrid_shard, p.schedule, p.vpp, p.sequence_parallel,
                    p.cp_kind, p.recompute.modules, p.offload_activations, p.offload_optimizer, p.offload_parameters, p.micro_batch,
                    p.algorithm, p.bucket_bytes);
}

double sought(Objective objective, const Candidate& c) {
  switch (objective) {
    case Objective::kTime: return c.seconds();
    case Objective::kMemory: return static_cast<double>(c.bytes());
    case Objective::kCost: return c.device_seconds();
  }
  return 0;
}

struct Cut {
  Point point;
  int32_t study = 0;
  double least_s = 0;
  double least = 0;  ///< of what is sought
};

/// The best so many, in order.
class Ranking {
 public:
  Ranking(Objective objective, int32_t most) : members_(Before{objective}), most_(static_cast<size_t>(most)) {}

  bool full() const { return members_.size() == most_; }
  bool empty() const { return members_.empty(); }
  const Candidate& front() const { return *members_.begin(); }
  const Candidate& back() const { return *members_.rbegin(); }
  /// Takes `c` in; what is left out for it, which may be `c`.
  std::optional<Candidate> add(const Candidate& c) {
    if (full() && !members_.key_comp()(c, back())) return c;
    members_.insert(c);
    if (members_.size() <= most_) return std::nullopt;
    return std::move(members_.extract(std::prev(members_.end())).value());
  }
  std::vector<Candidate> list(size_t most) const {
    std::vector<Candidate> all;
    for (auto at = members_.begin(); at != members_.end() && all.size() < most; ++at) all.push_back(*at);
    return all;
  }

 private:
  struct Before {
    Objective objective;
    bool operator()(const Candidate& a, const Candidate& b) const { return better(objective, a, b); }
  };
  std::multiset<Candidate, Before> members_;
  size_t most_;
};

class Searcher {
 public:
  Searcher(std::span<const Study> studies, const Space& space, const Options& options, Watcher* watcher)
      : studies_(studies),
        space_(space),
        options_(options),
        watcher_(watcher),
        losers_(options.objective),
        best_(options.objective, options.top),
        tight_(options.objective, options.top),
        fronts_(studies.size()) {
    for (const Study& study : studies) estimators_.emplace_back(study.prepared);
  }

  Found run() {
    for (size_t i = 0; i < studies_.size(); ++i) collect(i);
    // Best first: the sooner good layouts are known, the more the bounds dismiss. Equal bounds keep their order.
    std::stable_sort(cuts_.begin(), cuts_.end(), [](const Cut& a, const Cut& b) { return a.least < b.least; });
    found_.counts.cuts = static_cast<int64_t>(cuts_.size());
    for (const Cut& cut : cuts_) {
      if (found_.stopped) break;
      visit(cut);
      ++found_.counts.cuts_done;
    }
    found_.best = best_.list(SIZE_MAX), found_.tight = tight_.list(SIZE_MAX);
    found_.front = joined(fronts_);
    found_.losers = losers_.list();
    return std::move(found_);
  }

 private:
  const std::vector<Order>& orders(int32_t stages) {
    auto at = orders_.find(stages);
    if (at == orders_.end()) at = orders_.emplace(stages, orders_of(space_, shape().layers, stages)).first;
    return at->second;
  }
  const analytic::ModelShape& shape() const { return studies_[0].prepared.shape(); }
  std::vector<State> states(const Cut& cut) const {
    return states_of(space_, cut.point, studies_[static_cast<size_t>(cut.study)].prepared.machine().devices_per_node);
  }

  void collect(size_t study) {
    const analytic::Prepared& prepared = studies_[study].prepared;
    const auto take = [&](const Point& p) {
      Cut cut{.point = p, .study = static_cast<int32_t>(study)};
      const std::vector<State> all = states(cut);
      const auto points = static_cast<int64_t>(all.size() * orders(p.pp).size());
      found_.counts.points += points;
      if (const Refusal refusal = refusal_of(prepared, p); refusal != Refusal::kNone) {
        found_.counts.refused += points;
        losers_.illegal(refusal, points, p);
        return;
      }
      cut.least_s = estimators_[study].least_step_s(p);
      cut.least = least_of(cut, all);
      cuts_.push_back(cut);
    };
    const auto undivided = [&](const Point& p) {
      ++found_.counts.points, ++found_.counts.refused;
      losers_.undivided(p);
    };
    for_each_cut(space_, shape(), studies_[study].devices, take, undivided);
  }

  /// Bound on what is sought over all of a cut.
  double least_of(const Cut& cut, const std::vector<State>& all) {
    if (options_.objective == Objective::kTime) return cut.least_s;
    if (options_.objective == Objective::kCost) return cut.least_s * static_cast<double>(cut.point.world_size());
    const size_t study = static_cast<size_t>(cut.study);
    double least = -1;
    for (const State& state : all) {
      const Point p = with(cut.point, state);
      if (refusal_of(studies_[study].prepared, p) != Refusal::kNone) continue;
      const double bytes = estimators_[study].least_device_bytes(p);
      least = least < 0 ? bytes : std::min(least, bytes);
    }
    return std::max(least, 0.0);
  }

  void visit(const Cut& cut) {
    const size_t study = static_cast<size_t>(cut.study);
    const std::vector<Order>& in_order = orders(cut.point.pp);
    const auto points = static_cast<int64_t>(in_order.size());
    for (const State& state : states(cut)) {
      const Point p = with(cut.point, state);
      if (const Refusal refusal = refusal_of(studies_[study].prepared, p); refusal != Refusal::kNone) {
        found_.counts.refused += points;
        losers_.illegal(refusal, points, p);
        continue;
      }
      if (options_.prune && dismissed(cut, p, points)) continue;
      for (const Order& order : in_order) estimate(study, with(p, order));
      tell(points);
      if (found_.stopped) return;
    }
  }

  /// Whether bounds say that none of the `points` orders of `p` fits, or that none is better than what is known in anything.
  bool dismissed(const Cut& cut, const Point& p, int64_t points) {
    const auto study = static_cast<size_t>(cut.study);
    const double bytes = estimators_[study].least_device_bytes(p);
    if (options_.capacity_bytes > 0 && bytes > static_cast<double>(options_.capacity_bytes)) {
      found_.counts.bounded += points;
      losers_.too_large(points, p, static_cast<int64_t>(bytes), true);
      return true;
    }
    if (options_.most_s > 0 && cut.least_s > options_.most_s) {
      found_.counts.bounded += points;
      losers_.late(points, p, cut.least_s, true);
      return true;
    }
    // What is tight is of no interest either where it does not beat the last of what fits.
    if (!best_.full()) return false;
    const double least = options_.objective == Objective::kMemory ? bytes : cut.least;
    if (least <= sought(options_.objective, best_.back())) return false;
    if (!fronts_[study].covers(cut.least_s, static_cast<int64_t>(bytes))) return false;
    found_.counts.bounded += points;
    losers_.bounded(points, p, cut.least_s);
    return true;
  }

  void estimate(size_t study, const Point& p) {
    const analytic::Estimate e = estimators_[study](p);
    if (!e.legal()) {
      ++found_.counts.refused;
      losers_.illegal(e.refusal, 1, p);
      return;
    }
    ++found_.counts.evaluated;
    const int64_t bytes = e.memory.device();
    if (options_.capacity_bytes > 0 && bytes > options_.capacity_bytes) return losers_.too_large(1, p, bytes, false);
    if (options_.most_s > 0 && e.step_s > options_.most_s) return losers_.late(1, p, e.step_s, false);
    const Candidate candidate{p, e};
    if (verdict_of(e.memory, options_) == whatif::Verdict::kTight) {
      losers_.tight(candidate);
      tight_.add(candidate);
      return;
    }
    if (!fronts_[study].covers(candidate.seconds(), bytes)) fronts_[study].add(candidate);
    rank(candidate);
  }

  void rank(const Candidate& c) {
    const bool first = best_.empty() || better(options_.objective, c, best_.front());
    const std::optional<Candidate> out = best_.add(c);
    if (first) losers_.new_best(c.point);
    if (out) losers_.beaten(*out, best_.front());
  }

  void tell(int64_t points) {
    constexpr int64_t kPeriod = 4096;
    constexpr size_t kTold = 100;
    untold_ += points;
    if (watcher_ == nullptr || untold_ < kPeriod) return;
    untold_ = 0;
    found_.stopped = !watcher_->going(found_.counts, best_.list(kTold));
  }

  std::span<const Study> studies_;
  const Space& space_;
  const Options& options_;
  Watcher* watcher_;
  std::vector<Estimator> estimators_;
  std::map<int32_t, std::vector<Order>> orders_;
  std::vector<Cut> cuts_;
  Losers losers_;
  Ranking best_, tight_;
  std::vector<Front> fronts_;
  Found found_;
  int64_t untold_ = 0;
};

}  // namespace

std::string_view name_of(Objective v) { return kObjectives[static_cast<size_t>(v)]; }

std::optional<Objective> objective_named(std::string_view name) {
  for (size_t i = 0; i < std::size(kObjectives); ++i)
    if (kObjectives[i] == name) return static_cast<Objective>(i);
  return std::nullopt;
}

whatif::Verdict verdict_of(const analytic::MemoryBytes& memory, const Options& options) {
  const int64_t device = memory.device(), reserved = memory.reserved();
  whatif::Interval range = whatif::device_interval(reserved, device - reserved, options.reserved_error);
  range.high = std::max(range.high, device + options.margin_bytes);
  return whatif::verdict_of(device, range, options.capacity_bytes);
}

bool better(Objective objective, const Candidate& a, const Candidate& b) {
  const auto key = [&](const Candidate& c) {
    return std::tuple(sought(objective, c), c.seconds(), c.bytes(), c.point.world_size(), axes(c.point));
  };
  return key(a) < key(b);
}

Found search(std::span<const Study> studies, const Space& space, const Options& options, Watcher* watcher) {
  SHARDLAB_CHECK(!studies.empty() && options.top > 0, "a search on {} studies for the best {}", studies.size(), options.top);
  return Searcher(studies, space, options, watcher).run();
}

}  // namespace shardlab::simulator::search
