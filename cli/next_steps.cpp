#include "cli/next_steps.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <set>

#include "cases/analytic_case.h"
#include "reports/columns.h"
#include "reports/format.h"

namespace shardlab::cli {
namespace {

/// A change of one decision, in words.
struct Change {
  std::string says;
  Case config;
};

/// As many micro-batches as make the step's tokens; none where no whole number does.
bool refill(Case& c) {
  const int64_t part = c.train.seq_len * c.train.micro_batch * c.layout.dp;
  if (part <= 0 || c.train.global_batch_tokens % part != 0) return false;
  c.train.grad_accumulation = static_cast<int>(c.train.global_batch_tokens / part);
  return c.train.grad_accumulation > 0;
}

std::vector<Change> neighbours(const Case& base) {
  std::vector<Change> out;
  const auto add = [&](std::string says, const std::function<void(Case&)>& change) {
    Case config = base;
    change(config);
    if (refill(config) && config.layout.world_size() == base.layout.world_size())
      out.push_back({std::move(says), std::move(config)});
  };
  const Layout& l = base.layout;
  const auto& mb = base.train.micro_batch;
  add(fmt::format("micro_batch {}", 2 * mb), [](Case& c) { c.train.micro_batch *= 2; });
  if (mb % 2 == 0) add(fmt::format("micro_batch {}", mb / 2), [](Case& c) { c.train.micro_batch /= 2; });
  struct Axis {
    std::string_view name;
    int Layout::*size;
  };
  constexpr Axis kAxes[] = {{"dp", &Layout::dp}, {"tp", &Layout::tp}, {"pp", &Layout::pp}, {"cp", &Layout::cp}};
  for (const Axis& from : kAxes)
    for (const Axis& to : kAxes) {
      if (from.size == to.size || l.*from.size % 2 != 0) continue;
      add(fmt::format("{} {} and {} {}", to.name, 2 * (l.*to.size), from.name, l.*from.size / 2), [&](Case& c) {
        c.layout.*from.size /= 2, c.layout.*to.size *= 2;
        if (c.layout.pp == 1) c.layout.schedule = Schedule::kNone, c.layout.vpp = 1;
        if (c.layout.pp > 1 && c.layout.schedule == Schedule::kNone) c.layout.schedule = Schedule::k1F1B;
        if (c.layout.dp == 1) c.layout.zero = 0;
        if (c.layout.tp == 1) c.layout.sequence_parallel = false;
      });
    }
  for (const Recompute r : {Recompute::kNone, Recompute::kSelective, Recompute::kFull})
    if (l.recompute != r && l.recompute != Recompute::kByLayer)
      add(fmt::format("recompute {}", name_of(r)), [&](Case& c) { c.layout.recompute = r; });
  for (const int zero : {0, 1, 2, 3})
    if (l.dp > 1 && l.zero != zero) add(fmt::format("zero {}", zero), [&](Case& c) { c.layout.zero = zero; });
  if (l.dp > 1 && !l.overlap) add("overlap true", [](Case& c) { c.layout.overlap = true; });
  if (l.tp > 1 && !l.sequence_parallel) add("sequence_parallel true", [](Case& c) { c.layout.sequence_parallel = true; });
  return out;
}

sweeps::Point point_of(const Case& config) {
  sweeps::Point point;
  point.config = config;
  point.derived = true;
  return point;
}

double step_of(const CaseOutcome& o) { return o.status == Status::kOk && o.predicted ? o.predicted->step_s : 0; }

std::string memory_words(const CaseOutcome& o) {
  int64_t budget = o.config.machine.device.memory_bytes;
  if (!o.predicted->stages.empty())
    budget = std::ranges::max_element(o.predicted->stages, {}, &StageNeed::peak_bytes)->capacity_bytes;
  return budget > 0 ? fmt::format("{} of {}", brief_bytes(o.predicted->peak_bytes), brief_bytes(budget))
                    : brief_bytes(o.predicted->peak_bytes);
}

}  // namespace

std::optional<sweeps::Point> point_of(const CaseOutcome& o) {
  if (o.config.profile != "shardlab" && o.parameters != parameter_count(o.config.model)) return std::nullopt;
  return point_of(o.config);
}

std::vector<std::string> next_steps(const CaseOutcome& best, std::span<const CaseOutcome> cases) {
  constexpr double kWorth = 0.01;  // of the rate
  constexpr size_t kSaid = 3;
  const auto point = point_of(best);
  if (!point) return {};
  AnalyticCaseRunner runner;
  const double own = step_of(runner.run(*point, Mode::kSimulate));
  if (own <= 0) return {};
  // Of a machine that a store does not hold whole, or by another version, neighbours cannot be held against the best.
  if (predicted_by(best) == "analytic" && std::abs(own - best.predicted->step_s) > 1e-9 * own) return {};
  std::set<std::string> known;
  for (const CaseOutcome& o : cases) known.insert(o.case_id);
  struct Found {
    double gain;
    std::string says;
  };
  std::vector<Found> found;
  int tried = 0, refused = 0;
  for (const Change& change : neighbours(best.config)) {
    if (known.contains(sweeps::case_id(change.config))) continue;
    const CaseOutcome o = runner.run(point_of(change.config), Mode::kSimulate);
    ++tried;
    const double step = step_of(o);
    if (step <= 0) {
      ++refused;
      continue;
    }
    const double gain = own / step - 1;
    if (gain > kWorth)
      found.push_back({gain, fmt::format("{} (predicted: {} a step, {} more tokens per second, {} of memory)", change.says,
                                         brief_seconds(step), brief_percent(gain), memory_words(o))});
  }
  if (tried == 0) return {};
  std::ranges::stable_sort(found, std::greater(), &Found::gain);
  const std::string rest = refused > 0 ? fmt::format(", of which {} cannot be or do not fit", refused) : "";
  if (found.empty())
    return {fmt::format(
        "None of {} layouts beside the best one, which differ from it in one decision{}, is predicted to be more than 1 % faster.",
        tried, rest)};
  std::string text;
  for (size_t i = 0; i < std::min(found.size(), kSaid); ++i) text += fmt::format("{}{}", i == 0 ? "" : "; or ", found[i].says);
  return {fmt::format(
      "Not among these cases: {}. {} neighbours of the best layout were predicted{}; the best layout itself is {} a step there.",
      text, tried, rest, brief_seconds(own))};
}

}  // namespace shardlab::cli
