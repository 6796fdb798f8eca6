#include "simulator/interpreter/recompute_budget.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>

#include "simulator/interpreter/stage_peaks.h"

namespace shardlab::simulator {
namespace {

/// A treatment as the search sees it: what a layer under it keeps on the device, and its highest moments beyond what the layers
/// below keep.
struct Choice {
  size_t number = 0;  ///< of the treatment
  LayerTreatment treatment;
  double seconds = 0;
  int64_t kept = 0;     ///< output included; 0 where it is parked
  int64_t forward = 0;  ///< the end of its forward, or higher before
  int64_t backward = 0;

  /// No assignment gets worse by taking this one for `other`.
  bool beats(const Choice& other) const {
    return treatment.parked == other.treatment.parked && seconds <= other.seconds && kept <= other.kept &&
           forward <= other.forward && backward <= other.backward;
  }
};

/// Without those that others beat; the cheapest first.
std::vector<Choice> choices_of(const StagePeaks& peaks, std::span<const PricedTreatment> priced) {
  std::vector<Choice> all, left;
  for (size_t t = 0; t < priced.size(); ++t)
    all.push_back({t, priced[t].treatment, priced[t].seconds, peaks.kept(t), peaks.forward(t), peaks.backward(t)});
  std::ranges::stable_sort(all, {}, [](const Choice& t) { return std::pair(t.seconds, t.kept); });
  for (size_t i = 0; i < all.size(); ++i) {
    bool beaten = false;
    for (size_t j = 0; j < all.size(); ++j)  // of two that beat each other the first stays
      beaten = beaten || (j != i && all[j].beats(all[i]) && !(all[i].beats(all[j]) && i < j));
    if (!beaten) left.push_back(all[i]);
  }
  return left;
}

/// The lower convex hull of (bytes kept, seconds) of some choices: seconds of a layer that may keep so many bytes, at least.
class Hull {
 public:
  explicit Hull(std::span<const Choice> choices) {
    std::vector<std::pair<double, double>> all;
    for (const Choice& c : choices) all.emplace_back(static_cast<double>(c.kept), c.seconds);
    std::ranges::sort(all);
    for (const auto& p : all) {
      if (!points_.empty() && p.second >= points_.back().second) continue;  // keeps more and costs no less
      while (points_.size() > 1 && above(points_[points_.size() - 2], points_.back(), p)) points_.pop_back();
      points_.push_back(p);
    }
  }
  double least_bytes() const { return points_.front().first; }
  double seconds(double bytes) const {
    for (size_t i = 1; i < points_.size(); ++i) {
      const auto& [x0, y0] = points_[i - 1];
      const auto& [x1, y1] = points_[i];
      if (bytes < x1) return y0 + (y1 - y0) * (bytes - x0) / (x1 - x0);
    }
    return points_.back().second;
  }

 private:
  using Point = std::pair<double, double>;
  static bool above(const Point& a, const Point& b, const Point& c) {
    return (b.second - a.second) * (c.first - a.first) >= (c.second - a.second) * (b.first - a.first);
  }
  std::vector<Point> points_;  ///< ascending bytes, descending seconds
};

/// The best assignment for one stage.
class StageSearch {
 public:
  StageSearch(const StagePeaks& peaks, int64_t stage, const ByteBudget& budget, std::span<const Choice> choices)
      : budget_(budget),
        choices_(choices),
        peaks_(peaks),
        stage_(stage),
        layers_(std::ssize(peaks.layers(stage))),
        counts_(choices.size(), 0),
        fixed_(peaks.whole_step(stage)),
        in_flight_(peaks.in_flight(stage)) {
    for (size_t i = 0; i < choices_.size(); ++i) hulls_.emplace_back(choices_.subspan(i)), order_.push_back(i);
    // Those that keep least are first; of equals those whose backward rises highest.
    std::ranges::stable_sort(order_, {}, [&](size_t i) { return std::pair(choices_[i].kept, -choices_[i].backward); });
  }

  /// The cheapest that fits, or nothing.
  std::optional<std::vector<LayerTreatment>> cheapest() {
    least_peak_ = false;
    start();
    return assignment();
  }
  /// The lowest peak that any has within the budget of host memory; INT64_MAX where none is within that.
  int64_t lowest() {
    least_peak_ = true;
    start();
    return best_peak_;
  }
  double seconds() const { return best_seconds_; }
  int64_t peak() const { return best_peak_; }
  int64_t looked_at() const { return looked_at_; }
  bool proven() const { return !stopped_; }

 private:
  void start() {
    best_.clear();
    best_seconds_ = std::numeric_limits<double>::infinity();
    best_peak_ = std::numeric_limits<int64_t>::max();
    looked_at_ = 0;
    mix_pairs();
    branch(0, layers_, 0, 0);
  }

  /// A first answer to prune with: of each two choices, as few layers of the one that saves more as fit.
  void mix_pairs() {
    for (size_t a = 0; a < choices_.size(); ++a)
      for (size_t b = 0; b < choices_.size(); ++b) {
        if (choices_[a].kept < choices_[b].kept) continue;
        int64_t low = 0, high = layers_;
        while (low < high) {
          const int64_t middle = (low + high) / 2;
          if (try_pair(a, b, middle))
            high = middle;
          else
            low = middle + 1;
        }
        try_pair(a, b, low);
      }
  }
  bool try_pair(size_t a, size_t b, int64_t of_b) {
    std::ranges::fill(counts_, 0);
    counts_[a] += layers_ - of_b;
    counts_[b] += of_b;
    const double sum = static_cast<double>(layers_ - of_b) * choices_[a].seconds + static_cast<double>(of_b) * choices_[b].seconds;
    const bool fit = look(sum);
    std::ranges::fill(counts_, 0);
    return fit;
  }

  /// Assigns `left` layers to the choices from `from` on.
  void branch(size_t from, int64_t left, int64_t kept, double sum) {
    if (left == 0) {
      look(sum);
      return;
    }
    if (from == choices_.size() || hopeless(from, left, kept, sum)) return;
    stopped_ = stopped_ || looked_at_ >= kMostLookedAt;
    if (stopped_) return;
    const Choice& c = choices_[from];
    for (int64_t count = left; count >= 0; --count) {
      counts_[from] = count;
      branch(from + 1, left - count, kept + count * c.kept, sum + static_cast<double>(count) * c.seconds);
    }
    counts_[from] = 0;
  }

  bool hopeless(size_t from, int64_t left, int64_t kept, double sum) const {
    const double rest = static_cast<double>(left);
    const double base = static_cast<double>(fixed_ + in_flight_ * kept), each = static_cast<double>(in_flight_) * rest;
    const double least = base + each * hulls_[from].least_bytes();
    if (least_peak_) return least >= static_cast<double>(best_peak_);
    if (least > static_cast<double>(budget_.device)) return true;
    const double bound = sum + rest * hulls_[from].seconds((static_cast<double>(budget_.device) - base) / each);
    return bound >= best_seconds_ * (1 + kSame);
  }

  /// Evaluates the counts, in the orders that can matter; returns whether they fit in one.
  bool look(double sum) {
    std::vector<size_t> groups;
    bool parks = false;
    for (const size_t i : order_)
      if (counts_[i] > 0) groups.push_back(i), parks = parks || choices_[i].treatment.parked;
    std::vector<size_t> places(groups.size());
    std::iota(places.begin(), places.end(), size_t{0});
    bool fit = false;
    do {
      std::vector<size_t> layers;
      for (const size_t place : places) layers.insert(layers.end(), static_cast<size_t>(counts_[groups[place]]), groups[place]);
      fit = look_at(std::move(layers), sum) || fit;
    } while (parks && (least_peak_ || !fit) && looked_at_ < kMostLookedAt && std::ranges::next_permutation(places).found);
    return fit;
  }

  /// `layers`: the choice of each.
  bool look_at(std::vector<size_t> layers, double sum) {
    std::vector<size_t> assigned;
    for (const size_t choice : layers) assigned.push_back(choices_[choice].number);
    const StagePeaks::Peak peak = peaks_.peak(stage_, assigned);
    ++looked_at_;
    const bool fit = (least_peak_ || peak.device <= budget_.device) && peak.host <= budget_.host;
    const bool same = sum <= best_seconds_ * (1 + kSame) && best_seconds_ <= sum * (1 + kSame);
    const bool better = least_peak_ || same ? peak.device < best_peak_ : sum < best_seconds_;
    if (fit && better) best_ = std::move(layers), best_seconds_ = sum, best_peak_ = peak.device;
    return fit;
  }

  std::optional<std::vector<LayerTreatment>> assignment() const {
    if (!std::isfinite(best_seconds_)) return std::nullopt;
    std::vector<LayerTreatment> layers;
    for (const size_t choice : best_) layers.push_back(choices_[choice].treatment);
    return layers;
  }

  static constexpr double kSame = 1e-12;  ///< sums of seconds in another order

  const ByteBudget budget_;
  const std::span<const Choice> choices_;
  const StagePeaks& peaks_;
  const int64_t stage_, layers_;
  std::vector<int64_t> counts_;  ///< by choice
  std::vector<Hull> hulls_;      ///< of the choices from each on
  std::vector<size_t> order_;    ///< of choices, from the stage's first layer
  const int64_t fixed_, in_flight_;
  int64_t looked_at_ = 0;
  bool least_peak_ = false, stopped_ = false;
  std::vector<size_t> best_;  ///< the choice of each layer
  double best_seconds_ = 0;
  int64_t best_peak_ = 0;
};

Error too_small(const ByteBudget& budget, int64_t least, int64_t stage) {
  if (least == INT64_MAX)
    return {
        ExitCode::kNo,
        fmt::format("recompute within {} bytes: stage {} needs more than the {} of host memory", budget.device, stage, budget.host),
        "park less state in host memory: offload.optimizer: none",
        {},
        ErrorKind::kDoesNotFit};
  return {ExitCode::kNo,
          fmt::format("recompute within {} bytes: stage {} needs at least {}, with all made again or parked that can be",
                      budget.device, stage, least),
          fmt::format("set recompute_options.budget_bytes to {} or more, or use a smaller micro_batch, more zero, tp or pp", least),
          {},
          ErrorKind::kDoesNotFit};
}

}  // namespace

Case decided(Case config, std::span<const LayerTreatment> layers) {
  config.layout.recompute = Recompute::kByLayer;
  config.layout.recompute_options.modules.clear();
  config.layout.recompute_options.every = 1;
  config.layout.recompute_options.layers = treatments_text(layers);
  config.layout.offload.activations = OffloadTo::kNone;
  return config;
}

Result<BudgetChoice> choose_within(const Case& config, const ByteBudget& budget, std::span<const PricedTreatment> priced,
                                   const Lower& lower) {
  std::vector<LayerTreatment> treatments;
  for (const PricedTreatment& p : priced) treatments.push_back(p.treatment);
  const auto peaks = StagePeaks::of(config, std::move(treatments), lower);
  if (!peaks.ok()) return peaks.error();
  const std::vector<Choice> choices = choices_of(*peaks, priced);
  BudgetChoice all;
  all.layers.resize(static_cast<size_t>(config.model.layers));
  for (int64_t stage = 0; stage < config.layout.pp; ++stage) {
    StageSearch search(*peaks, stage, budget, choices);
    const auto best = search.cheapest();
    if (!best) return too_small(budget, search.lowest(), stage);
    for (size_t i = 0; i < best->size(); ++i) all.layers[static_cast<size_t>(peaks->layers(stage)[i])] = (*best)[i];
    all.seconds += search.seconds();
    all.peak_bytes = std::max(all.peak_bytes, search.peak());
    all.looked_at += search.looked_at();
    all.proven = all.proven && search.proven();
  }
  return all;
}

}  // namespace shardlab::simulator
