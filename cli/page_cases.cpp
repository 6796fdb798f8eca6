#include "cli/page_cases.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "cases/pipeline.h"
#include "plan/memory.h"
#include "simulator/interpreter/collective_choice.h"
#include "simulator/interpreter/timeline.h"
#include "sweeps/sweep.h"

namespace shardlab::cli {
namespace {

constexpr size_t kMadeAnew = 8;        ///< cases that are simulated for a page
constexpr int64_t kMostWork = 65536;   ///< layers times micro-batches times simulated ranks of a stage: some three million ops
constexpr int64_t kLittleWork = 4096;  ///< layers times micro-batches, of whatever ranks are simulated
constexpr size_t kWithYaml = 40;

double rate_of(const CaseOutcome& o) {
  const double step = o.measured ? o.measured->step_s : o.predicted ? o.predicted->step_s : 0;
  return o.status == Status::kOk && step > 0 ? static_cast<double>(o.config.train.global_batch_tokens) / step : 0;
}

std::vector<StageMemory> stages_of(const Plan& plan, const CaseOutcome& outcome) {
  std::vector<StageMemory> stages;
  for (size_t role = 0; role < plan.roles.size(); ++role) {
    const MemoryPeak peak = memory_peak(plan, static_cast<int>(role))[static_cast<size_t>(Space::kDevice)];
    StageMemory stage{plan.roles[role].stage, 0, peak.at_peak, peak.peak_bytes, peak.moment, std::nullopt};
    for (int rank = 0; rank < plan.mesh.world_size(); ++rank) {
      if (plan.mesh.role_of(rank) != static_cast<int>(role)) continue;
      ++stage.ranks;
      if (outcome.measured && static_cast<size_t>(rank) < outcome.measured->peak_by_rank.size())
        stage.measured_bytes =
            std::max(stage.measured_bytes.value_or(0), outcome.measured->peak_by_rank[static_cast<size_t>(rank)]);
    }
    stages.push_back(std::move(stage));
  }
  return stages;
}

/// Calls of all lanes.
int64_t calls_of(const std::vector<Timeline>& timelines) {
  int64_t calls = 0;
  for (const Timeline& t : timelines)
    for (const TimelineLane& lane : t.lanes) calls += static_cast<int64_t>(lane.calls.size());
  return calls;
}

void add(const Plan& plan, const std::vector<Program>& programs, const Trace* predicted, const Trace* measured, bool made_anew,
         const CaseOutcome& outcome, Report& report) {
  TimelineOptions options;
  options.max_intervals = kIntervals;
  options.max_calls = std::max(kCalls - calls_of(report.timelines), kFewCalls);
  Timeline timeline = make_timeline(plan, programs, predicted, measured, options);
  timeline.case_id = outcome.case_id;
  timeline.label = outcome.config.name;
  timeline.made_anew = made_anew;
  report.timelines.push_back(std::move(timeline));
  CaseDetail& detail = report.details[outcome.case_id];
  detail.stages = stages_of(plan, outcome);
  detail.collectives = priced_collectives(outcome.config, plan);
}

bool can_be_simulated(const CaseOutcome& o) {
  const Case& c = o.config;
  if (o.status != Status::kOk || o.measured || !o.predicted || o.predicted->step_s <= 0 || c.profile != "shardlab") return false;
  const int64_t ranks = c.layout.world_size(), work = static_cast<int64_t>(c.model.layers) * c.train.grad_accumulation;
  const bool one_a_stage = !c.machine.local && ranks > simulator::SimulateOptions().max_individual_ranks;
  return one_a_stage ? work <= kMostWork : work <= kLittleWork || work * ranks / c.layout.pp <= kMostWork;
}

void simulate_one(const CaseOutcome& outcome, Report& report) {
  const auto config = decide(outcome.config);
  if (!config.ok()) return;
  const auto placed = prepare(*config);
  if (!placed.ok()) return;
  const auto predicted = predict_case(*config, *placed);
  if (!predicted.ok() || predicted->trace.events.empty()) return;
  add(*placed->plan, placed->programs, &predicted->trace, nullptr, true, outcome, report);
}

}  // namespace

bool add_recorded(const RecordedCase& recorded, const CaseOutcome& outcome, Report& report) {
  if (!recorded.plan) return false;
  add(*recorded.plan, recorded.programs, recorded.predicted ? &*recorded.predicted : nullptr,
      recorded.measured ? &*recorded.measured : nullptr, false, outcome, report);
  return true;
}

std::vector<size_t> first_looked_at(const Report& report, size_t most) {
  std::vector<size_t> order(report.cases.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto peak = [&](size_t i) { return report.cases[i].predicted ? report.cases[i].predicted->peak_bytes : INT64_MAX; };
  std::ranges::stable_sort(order, std::greater(), [&](size_t i) { return rate_of(report.cases[i]); });
  std::erase_if(order, [&](size_t i) { return rate_of(report.cases[i]) <= 0; });
  if (order.size() <= most) return order;
  const size_t smallest = *std::ranges::min_element(order, {}, peak);
  order.resize(most);
  if (std::ranges::find(order, smallest) == order.end()) order.back() = smallest;
  return order;
}

void add_simulated(Report& report, const std::set<std::string>& damaged) {
  std::set<std::string> have = damaged;
  for (const Timeline& t : report.timelines) have.insert(t.case_id);
  for (const size_t i : first_looked_at(report, kMadeAnew)) {
    const CaseOutcome& outcome = report.cases[i];
    if (static_cast<int>(report.timelines.size()) < kTimelines && !have.contains(outcome.case_id) && can_be_simulated(outcome))
      simulate_one(outcome, report);
  }
}

void add_yaml(Report& report) {
  for (const size_t i : first_looked_at(report, kWithYaml))
    report.details[report.cases[i].case_id].yaml = sweeps::to_yaml(report.cases[i].config);
}

}  // namespace shardlab::cli
