#include "simulator/estimator/memory/changes.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <iterator>

#include "plan/base/check.h"

namespace shardlab::simulator::whatif {
namespace {

using analytic::Estimate;
using analytic::Estimator;
using analytic::FrameworkProfile;
using analytic::Medium;
using analytic::Point;
using analytic::Recompute;
using analytic::Schedule;

/// One alternative of one key; false where it is none for this point.
using Step = std::function<bool(Point&)>;
/// Alternatives of one key; a combination takes at most one of them.
using Steps = std::vector<Step>;

constexpr int32_t kMostParts = 8;  ///< by which one key is multiplied
constexpr int kMostSteps = 3;      ///< at once

/// Takes a factor out of dp; the tokens of a step stay, accumulated.
bool take_from_dp(Point& p, int32_t factor) {
  if (p.dp % factor != 0 || int64_t{p.grad_accumulation} * factor > (1 << 20)) return false;
  p.dp /= factor, p.grad_accumulation *= factor;
  if (p.hybrid_shard > 0) p.hybrid_shard = 0;  // sets of shards were counted in the old dp
  return true;
}

/// Multiplies `member` by 2, 4 and 8. `slices`: tp cuts experts too where none has been said.
Steps doublings(int32_t Point::*member, bool at_the_expense_of_dp, bool slices = false) {
  Steps steps;
  for (int32_t factor = 2; factor <= kMostParts; factor *= 2)
    steps.push_back([=](Point& p) {
      if (at_the_expense_of_dp && !take_from_dp(p, factor)) return false;
      const bool experts_follow = member == &Point::tp && p.expert_tp == p.tp && (p.tp > 1 || slices);
      p.*member *= factor;
      if (experts_follow) p.expert_tp = p.tp;
      if (p.pp > 1 && p.schedule == Schedule::kNone) p.schedule = Schedule::k1F1B;
      return true;
    });
  return steps;
}

Steps recompute_steps(const FrameworkProfile& profile) {
  Steps steps;
  if (profile.model.selective.modules != 0)
    steps.push_back([](Point& p) { return p.recompute.modules == 0 && (p.recompute.modules = Recompute::kSelective, true); });
  steps.push_back([](Point& p) { return !p.recompute.full() && (p.recompute.modules = Recompute::kLayer, true); });
  return steps;
}

Steps zero_steps() {
  Steps steps;
  for (int32_t zero = 1; zero <= 3; ++zero)
    steps.push_back([zero](Point& p) { return p.dp > 1 && p.zero < zero && (p.zero = zero, true); });
  return steps;
}

Steps micro_batch_steps(int32_t micro_batch) {
  Steps steps;
  for (int32_t factor = 2; factor <= micro_batch && micro_batch % factor == 0; factor *= 2)
    steps.push_back([factor](Point& p) {
      if (int64_t{p.grad_accumulation} * factor > (1 << 20)) return false;
      return p.micro_batch /= factor, p.grad_accumulation *= factor, true;
    });
  return steps;
}

Steps offload_steps() {
  const auto optimizer = [](Point& p) {
    return p.offload_optimizer == Medium::kDevice && (p.offload_optimizer = Medium::kCpu, true);
  };
  const auto activations = [](Point& p) {
    return p.offload_activations == Medium::kDevice && (p.offload_activations = Medium::kCpu, true);
  };
  return {optimizer, activations, [=](Point& p) { return optimizer(p) && activations(p); }};
}

/// In this order: ranks of the model before those of the sequence before those of the experts, so that each combination
/// is made once.
std::vector<Steps> all_steps(const FrameworkProfile& profile, const Point& point, bool bf16, bool slices) {
  std::vector<Steps> keys{recompute_steps(profile),
                          zero_steps(),
                          micro_batch_steps(point.micro_batch),
                          doublings(&Point::tp, true, slices),
                          doublings(&Point::pp, true),
                          doublings(&Point::cp, true),
                          doublings(&Point::ep, false),
                          offload_steps()};
  keys.push_back({[](Point& p) { return p.tp > 1 && !p.sequence_parallel && (p.sequence_parallel = true, true); }});
  keys.push_back({[](Point& p) { return p.schedule == Schedule::kAfab && (p.schedule = Schedule::k1F1B, true); }});
  if (bf16) keys.push_back({[](Point& p) { return p.precision == Precision::kFp32 && (p.precision = Precision::kBf16, true); }});
  keys.push_back({[](Point& p) { return p.zero == 3 && p.reshard == 0 && (p.reshard = 1, true); }});
  return keys;
}

void combine(const std::vector<Steps>& keys, size_t from, int left, const Point& point,
             const std::function<void(const Point&)>& use) {
  if (left == 0) return;
  for (size_t i = from; i < keys.size(); ++i)
    for (const Step& step : keys[i]) {
      Point changed = point;
      if (!step(changed)) continue;
      use(changed);
      combine(keys, i + 1, left - 1, changed, use);
    }
}

bool contains(const Words& all, const Words& part) {
  return std::ranges::all_of(part, [&](const auto& word) { return std::ranges::find(all, word) != all.end(); });
}

Change change_of(const Point& from, const Point& to, const Estimate& estimate, double before_s) {
  return {.point = to,
          .words = changed_words(from, to),
          .device_bytes = estimate.memory.device(),
          .host_bytes = estimate.host_bytes,
          .step_s = estimate.step_s,
          .slowdown = before_s > 0 ? estimate.step_s / before_s - 1 : 0};
}

}  // namespace

Words words_of(const Point& p) {
  Words words;
  const auto add = [&](const char* key, std::string value) { words.emplace_back(key, std::move(value)); };
  const auto count = [&](const char* key, int64_t value, int64_t neutral) {
    if (value != neutral) add(key, fmt::format("{}", value));
  };
  count("dp", p.dp, 0), count("tp", p.tp, 0), count("pp", p.pp, 0);
  count("vpp", p.vpp, 1), count("cp", p.cp, 1), count("ep", p.ep, 1);
  if (p.cuts_experts_apart()) add("expert_tp", fmt::format("{}", p.expert_tp));
  count("zero", p.zero, -1);
  if (p.schedule != Schedule::kNone) add("schedule", std::string(name_of(p.schedule)));
  add("sequence_parallel", p.sequence_parallel ? "true" : "false");
  add("recompute", name_of(p.recompute));
  std::string offload;
  for (const auto& [what, where] :
       {std::pair{"activations", p.offload_activations}, {"optimizer", p.offload_optimizer}, {"parameters", p.offload_parameters}})
    if (where != Medium::kDevice) offload += fmt::format("{}{}={}", offload.empty() ? "" : ",", what, name_of(where));
  add("offload", offload.empty() ? "none" : offload);
  if (p.reshard >= 0 && p.zero == 3) add("fsdp.reshard", p.reshard != 0 ? "true" : "false");
  add("precision", std::string(name_of(p.precision)));
  count("micro_batch", p.micro_batch, 0), count("grad_accumulation", p.grad_accumulation, 0), count("seq_len", p.seq_len, 0);
  return words;
}

Words changed_words(const Point& from, const Point& to) {
  const Words before = words_of(from), after = words_of(to);
  Words changed;
  std::ranges::copy_if(after, std::back_inserter(changed),
                       [&](const auto& word) { return std::ranges::find(before, word) == before.end(); });
  for (const auto& said : before)  // back to what is neutral
    if (std::ranges::none_of(after, [&](const auto& word) { return word.first == said.first; }))
      changed.emplace_back(said.first, said.first == "schedule" ? "none" : "1");
  return changed;
}

std::string text_of(const Words& words) {
  std::string text;
  for (const auto& [key, value] : words) text += fmt::format("{}{}={}", text.empty() ? "" : " ", key, value);
  return text;
}

namespace {

/// Layers of all plans that one question makes.
constexpr int64_t kMostLayers = int64_t{1} << 16;
/// Layers times micro-batches of a layout beyond which the steps of changes are not simulated.
constexpr int64_t kMostTimedCells = 256;

/// Figures of layouts that shardlab's executor runs, by their plans; of others the estimate.
class Told {
 public:
  Told(Estimator& estimator, const FrameworkProfile& profile, const Point& point, const ChangeOptions& options)
      : estimator_(estimator), profile_(profile), point_(point), options_(options) {}
  void tell(Change& change, double before_s) const {
    if (!options_.lower) return;
    const Case* config = estimator_.executed(change.point);
    const auto plan = CasePlan::of(*config, options_.lower);
    SHARDLAB_CHECK(plan.ok(), "{}", to_string(plan.error()));
    Estimate e;
    tell_bytes(profile_, *plan, e);
    change.device_bytes = e.memory.device(), change.host_bytes = e.host_bytes;
    if (!options_.seconds || (scaled() && !(change.point == point_))) return;
    change.step_s = options_.seconds(*config, *plan);
    change.slowdown = before_s > 0 ? change.step_s / before_s - 1 : 0;
  }
  /// How much larger than the capacity an estimate may be whose plan fits.
  double slack() const { return options_.lower ? 1 + analytic::kPlanEstimateError : 1; }
  bool usable(const Point& p, const Estimate& e) const {
    return e.legal() && (!options_.lower || estimator_.executed(p) != nullptr);
  }
  /// Whether plans of layouts like that of the question take long to simulate: tens of milliseconds each.
  bool scaled() const {
    return options_.lower && options_.seconds &&
           estimator_.executed(point_)->model.layers * point_.grad_accumulation > kMostTimedCells;
  }
  /// Of how many layouts plans are made: a plan of thousands of layers takes seconds.
  size_t most_plans() const {
    if (!options_.lower) return SIZE_MAX;
    return static_cast<size_t>(std::max<int64_t>(4, kMostLayers / estimator_.executed(point_)->model.layers));
  }

 private:
  Estimator& estimator_;
  const FrameworkProfile& profile_;
  const Point& point_;  ///< of the question
  const ChangeOptions& options_;
};

/// The smallest of so many with the least estimates.
constexpr size_t kLeast = 3;

}  // namespace

Advice advise(Estimator& estimator, const FrameworkProfile& profile, const Point& point, const ChangeOptions& options) {
  Advice advice;
  const Told told(estimator, profile, point, options);
  const Estimate now = estimator(point);
  if (!told.usable(point, now)) return advice;
  advice.looked_at = 1;
  std::vector<Change> fitting, least{change_of(point, point, now, now.step_s)};
  const double limit = 0.98 * static_cast<double>(options.capacity);
  const Case* own = estimator.executed(point);
  const bool slices = own != nullptr && own->model.is_mixture();
  combine(all_steps(profile, point, options.bf16, slices), 0, kMostSteps, point, [&](const Point& changed) {
    const Estimate e = estimator(changed);
    if (!told.usable(changed, e)) return;
    ++advice.looked_at;
    const Change change = change_of(point, changed, e, now.step_s);
    const auto at = std::ranges::upper_bound(least, change.device_bytes, {}, &Change::device_bytes);
    if (at != least.end() || least.size() < kLeast) least.insert(at, change);
    if (least.size() > kLeast) least.pop_back();
    if (static_cast<double>(e.memory.device()) <= limit * told.slack()) fitting.push_back(change);
  });
  Change here = change_of(point, point, now, now.step_s);
  told.tell(here, 0);
  here.slowdown = 0;
  const double before_s = here.step_s;
  advice.scaled = told.scaled();
  if (advice.scaled)
    for (std::vector<Change>* list : {&fitting, &least})
      for (Change& change : *list) change.step_s *= before_s / now.step_s;
  size_t plans = told.most_plans() - 1;
  least.resize(std::min(least.size(), std::max<size_t>(1, plans / 3)));
  plans -= least.size();
  for (Change& change : least)
    if (change.point == point)
      change = here;
    else
      told.tell(change, before_s);
  advice.least = *std::ranges::min_element(least, {}, &Change::device_bytes);
  const auto sooner = [](const Change& a, const Change& b) {
    return a.step_s != b.step_s ? a.step_s < b.step_s : a.words.size() < b.words.size();
  };
  std::ranges::stable_sort(fitting, sooner);
  for (Change& change : fitting) {
    if (advice.changes.size() == options.most || plans == 0) break;
    if (std::ranges::any_of(advice.changes, [&](const Change& faster) { return contains(change.words, faster.words); })) continue;
    told.tell(change, before_s);
    --plans;
    if (static_cast<double>(change.device_bytes) <= limit) advice.changes.push_back(std::move(change));
  }
  std::ranges::stable_sort(advice.changes, sooner);
  return advice;
}

}  // namespace shardlab::simulator::whatif
