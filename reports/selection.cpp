#include "reports/selection.h"

#include <algorithm>
#include <functional>
#include <string_view>

namespace shardlab::reports {
namespace {

double step_of(const CaseOutcome& o) { return o.measured ? o.measured->step_s : o.predicted ? o.predicted->step_s : 0; }
int64_t peak_of(const CaseOutcome& o) {
  return o.measured ? o.measured->peak_bytes : o.predicted ? o.predicted->peak_bytes : INT64_MAX;
}

}  // namespace

void Selector::add(const CaseOutcome& outcome) {
  ++seen_[static_cast<size_t>(outcome.status)];
  const double step = step_of(outcome);
  const double rate =
      outcome.status == Status::kOk && step > 0 ? static_cast<double>(outcome.config.train.global_batch_tokens) / step : 0;
  const bool named = names_.contains(outcome.config.name);
  bool best = false;
  if (rate > 0) {
    Best& of_model = best_[outcome.config.model.name];
    best = rate > of_model.rate || peak_of(outcome) < of_model.peak;
    of_model = {std::max(rate, of_model.rate), std::min(peak_of(outcome), of_model.peak)};
  }
  if (!named && !best && rate <= least_rate_) {
    ++total_;
    return;
  }
  kept_.push_back({outcome, total_++, rate, named});
  if (kept_.size() > 2 * most_ + names_.size() + 2 * best_.size()) shrink();
}

/// The fastest first, those that stay before them.
void Selector::shrink() {
  enum class Stay : uint8_t { kNo, kAmong, kBeside };                    // among the most, or beside them
  std::map<std::string_view, Best> missing(best_.begin(), best_.end());  // the first of equals is taken
  const auto stays = [&](const Kept& k) {
    if (k.rate <= 0) return k.named ? Stay::kBeside : Stay::kNo;
    Best& wanted = missing[k.outcome.config.model.name];
    const bool fastest = k.rate == wanted.rate, smallest = peak_of(k.outcome) == wanted.peak;
    if (fastest) wanted.rate = -1;
    if (smallest) wanted.peak = -1;
    return k.named || smallest ? Stay::kBeside : fastest ? Stay::kAmong : Stay::kNo;
  };
  std::vector<bool> fixed;
  std::vector<size_t> order;
  size_t most = most_;
  for (size_t i = 0; i < kept_.size(); ++i) {
    const Stay stay = stays(kept_[i]);
    order.push_back(i), fixed.push_back(stay != Stay::kNo);
    most += stay == Stay::kBeside ? 1 : 0;
  }
  most = std::max(most, static_cast<size_t>(std::ranges::count(fixed, true)));
  std::ranges::stable_sort(
      order, [&](size_t a, size_t b) { return fixed[a] != fixed[b] ? fixed[a] > fixed[b] : kept_[a].rate > kept_[b].rate; });
  order.resize(std::min(order.size(), most));
  least_rate_ = fixed[order.back()] ? -1 : kept_[order.back()].rate;
  std::ranges::sort(order);
  std::vector<Kept> left;
  for (const size_t i : order) left.push_back(std::move(kept_[i]));
  kept_ = std::move(left);
}

Selection Selector::take() {
  if (kept_.size() > most_ && total_ > static_cast<int64_t>(most_)) shrink();
  Selection out;
  out.total = total_;
  out.left_out = seen_;
  for (Kept& k : kept_) {
    --out.left_out[static_cast<size_t>(k.outcome.status)];
    out.cases.push_back(std::move(k.outcome));
  }
  return out;
}

}  // namespace shardlab::reports
