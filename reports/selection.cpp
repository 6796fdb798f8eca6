#include "reports/selection.h"

#include <algorithm>
#include <functional>

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
  if (!named && rate <= least_rate_ && (rate <= 0 || peak_of(outcome) >= least_peak_)) {
    ++total_;
    return;
  }
  kept_.push_back({outcome, total_++, rate, named});
  if (kept_.size() > 2 * most_ + names_.size() + 1) shrink();
}

/// The fastest first, those that stay before them.
void Selector::shrink() {
  auto smallest = kept_.end();
  for (auto k = kept_.begin(); k != kept_.end(); ++k)
    if (k->rate > 0 && (smallest == kept_.end() || peak_of(k->outcome) < peak_of(smallest->outcome))) smallest = k;
  const auto stays = [&](const Kept& k) { return k.named || &k == &*smallest; };
  std::vector<bool> fixed;
  std::vector<size_t> order;
  size_t most = most_;
  for (size_t i = 0; i < kept_.size(); ++i) {
    order.push_back(i), fixed.push_back(smallest != kept_.end() ? stays(kept_[i]) : kept_[i].named);
    most += fixed.back() ? 1 : 0;
  }
  std::ranges::stable_sort(
      order, [&](size_t a, size_t b) { return fixed[a] != fixed[b] ? fixed[a] > fixed[b] : kept_[a].rate > kept_[b].rate; });
  order.resize(std::min(order.size(), most));
  least_rate_ = fixed[order.back()] ? -1 : kept_[order.back()].rate;
  if (smallest != kept_.end()) least_peak_ = peak_of(smallest->outcome);
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
