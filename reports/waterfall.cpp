#include "reports/waterfall.h"

#include <algorithm>

#include "reports/columns.h"

namespace shardlab::reports {
namespace {

/// The parts of figures that do not tell them, from their sums.
template <class Figures>
StepParts coarse(const Figures& f) {
  StepParts parts;
  parts.compute_s = std::min(f.compute_s, f.step_s);
  parts.copies_s = std::min(f.exposed_copy_s, f.step_s - parts.compute_s);
  const double rest = f.step_s - parts.compute_s - parts.copies_s;
  // Idle time has the waits for peers in it, which `exposed_comm_s` has too: the rest are bytes on their way.
  const double idle = f.idle.idle_s > 0 ? std::min(f.idle.idle_s, rest) : std::max(0.0, rest - f.exposed_comm_s);
  parts.communication_s = rest - idle;
  parts.bubble_s = std::min(f.bubble_fraction * f.step_s, idle);
  parts.wait_s = idle - parts.bubble_s;
  return parts;
}

template <class Figures>
std::vector<Bar> bars(const CaseOutcome& o, const Figures& f) {
  if (f.step_s <= 0) return {};
  const StepParts parts = f.parts.total() > 0 ? f.parts : coarse(f);
  std::vector<Bar> all;
  const auto add = [&](std::string_view name, double seconds) {
    if (seconds > 0) all.push_back({name, seconds});
  };
  for (const std::string_view name : bar_names()) {
    const auto part = std::ranges::find(kStepParts, name, &StepPartField::name);
    if (part != kStepParts.end() && part->seconds != &StepParts::compute_s) {
      add(name, parts.*part->seconds);
    } else if (name == "ideal") {
      const auto use = mfu(o, f.step_s);
      if (!use) {
        add("compute", parts.compute_s);
        continue;
      }
      const double ideal = std::min(*use * f.step_s, parts.compute_s);
      add("ideal", ideal);
      add("kernels", parts.compute_s - ideal);
    }
  }
  return all;
}

}  // namespace

const std::vector<std::string_view>& bar_names() {
  static const std::vector<std::string_view> names{"ideal",   "kernels", "compute", "recompute", "launch",        "tensor",
                                                   "context", "expert",  "data",    "pipeline",  "communication", "bubble",
                                                   "copies",  "update",  "wait",    "unplanned"};
  return names;
}

std::vector<Bar> waterfall(const CaseOutcome& o, bool measured) {
  if (measured) return o.measured ? bars(o, *o.measured) : std::vector<Bar>();
  return o.predicted ? bars(o, *o.predicted) : std::vector<Bar>();
}

}  // namespace shardlab::reports
