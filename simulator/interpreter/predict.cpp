#include "simulator/interpreter/predict.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "plan/memory.h"
#include "plan/period.h"
#include "plan/techniques.h"
#include "plan/wire.h"
#include "simulator/interpreter/routes.h"
#include "simulator/interpreter/segments/segments.h"
#include "simulator/interpreter/timeline.h"

namespace shardlab::simulator {
namespace {

/// Adds the times of a period on the rank with the longest step, divided by the steps of the period.
void add_times(const Plan& plan, double seconds, const Breakdown& b, const IdleBreakdown& idle, Prediction& p) {
  p.step_s = seconds / plan.period;
  p.compute_s = b.compute_s / plan.period;
  p.exposed_comm_s = b.exposed_comm_s / plan.period;
  p.exposed_copy_s = b.exposed_copy_s / plan.period;
  p.bubble_fraction = b.bubble_fraction;
  p.idle = idle_of_step(plan, idle);
}

/// Adds the wire bytes of a step, and what `routes` (null: even ones) say of experts.
void add_wire_of(const Case& config, const Plan& plan, const Routing& routing, const Routes* routes, Prediction& p) {
  add_routing(config, routing, p);
  for (const auto& [comm, bytes] : total_wire_bytes(plan, routes != nullptr ? PackedRows::kLeftOut : PackedRows::kEven))
    p.wire_bytes += bytes;
  int64_t exchanged = 0;
  if (routes != nullptr) {
    const Imbalance drawn = imbalance_of(routes->layers());
    p.expert_imbalance = drawn.by_expert;
    p.expert_rank_imbalance = drawn.by_rank;
    p.expert_rank_imbalance_contiguous = drawn.by_rank_contiguous;
    p.expert_rank_imbalance_peak = drawn.peak;
    p.wire_bytes += exchanged = routes->exchange_bytes();
  } else if (p.expert_rank_imbalance) {
    for (const auto& [comm, bytes] : total_wire_bytes(plan)) exchanged += bytes;
    for (const auto& [comm, bytes] : total_wire_bytes(plan, PackedRows::kLeftOut)) exchanged -= bytes;
  }
  if (p.expert_rank_imbalance) p.expert_exchange_bytes = bytes_of_step(plan, exchanged);
  if (p.expert_rank_imbalance && routing.is_even()) p.expert_rank_imbalance_peak = 1;
  if (bounds_experts(config) && p.expert_rank_imbalance_peak)
    p.expert_reruns = *p.expert_rank_imbalance_peak > static_cast<double>(config.layout.expert_bound) ? 1 : 0;
  p.wire_bytes = bytes_of_step(plan, p.wire_bytes);
}

/// Adds the figures that do not depend on how the plan is simulated.
void add_rest(const Case& config, const Plan& plan, int64_t arena_bytes, const PlacedCostModel& costs, const Routing& routing,
              const Routes* routes, Prediction& p) {
  for (size_t role = 0; role < plan.roles.size(); ++role) add_peaks(memory_peak(plan, static_cast<int>(role)), p);
  p.arena_bytes = arena_bytes;
  add_wire_of(config, plan, routing, routes, p);
  add_provenance(config, plan, costs, p);
}

/// None of an even routing, which a plan expects by itself.
std::optional<Routes> drawn(const Case& config, const Plan& plan, const std::vector<Program>& programs, const Routing& routing,
                            bool by_rank) {
  if (routing.is_even() || !config.model.is_mixture()) return std::nullopt;
  return std::optional<Routes>(std::in_place, plan, programs, routing, config.model.experts, by_rank);
}

bool any_extrapolated(const Plan& plan, const PlacedCostModel& costs) {
  std::vector<bool> called(plan.segments.size(), false);
  for (const Role& role : plan.roles)
    for (const Item& item : role.program)
      if (const Call* call = std::get_if<Call>(&item)) called[call->segment.index()] = true;
  for (size_t s = 0; s < called.size(); ++s)
    for (const Step& step : plan.segments[s].steps) {
      Instruction i;
      i.segment = &plan.segments[s], i.op = std::get_if<Op>(&step);
      if (called[s] && i.op != nullptr && costs.extrapolates(plan, i)) return true;
    }
  return false;
}

}  // namespace

void add_provenance(const Case& config, const Plan& plan, const PlacedCostModel& costs, Prediction& p) {
  // Rates of a processor are those of the library's matmul on one thread a rank; canonical mode multiplies in its own fixed order.
  const bool of_gpu = config.machine.calibration && config.machine.calibration->launch_ahead;
  p.extrapolated = (config.canonical && !of_gpu) || config.threads_per_rank != 1 || any_extrapolated(plan, costs);
  if (config.machine.calibration) p.calibration_id = config.machine.calibration->id;
}

void add_segment_times(const Plan& plan, SegmentTimeline& timeline, const Machine& machine, const PlacedCostModel& costs,
                       Prediction& p) {
  const SegmentStep step = timeline.step(machine, costs);
  add_times(plan, step.seconds, step.breakdown, step.idle, p);
}

void add_peaks(const std::array<MemoryPeak, kSpaces>& peaks, Prediction& p) {
  const auto of = [&](Space space) -> const MemoryPeak& { return peaks[static_cast<size_t>(space)]; };
  p.peak_bytes = std::max(p.peak_bytes, of(Space::kDevice).peak_bytes);
  for (const auto& [highest, space] :
       {std::pair{&p.memory, Space::kDevice}, {&p.host_memory, Space::kHost}, {&p.nvme_memory, Space::kNvme}})
    if (of(space).peak_bytes > highest->total()) *highest = of(space).at_peak;
}

void add_second_run(const Prediction& second, Prediction& p) {
  const double both = p.step_s + second.step_s;
  if (both > 0) p.bubble_fraction = (p.bubble_fraction * p.step_s + second.bubble_fraction * second.step_s) / both;
  for (double Prediction::*seconds :
       {&Prediction::step_s, &Prediction::compute_s, &Prediction::exposed_comm_s, &Prediction::exposed_copy_s})
    p.*seconds += second.*seconds;
  for (double IdleBreakdown::*cause :
       {&IdleBreakdown::idle_s, &IdleBreakdown::peer_s, &IdleBreakdown::dependency_s, &IdleBreakdown::host_s,
        &IdleBreakdown::latency_s, &IdleBreakdown::tail_s, &IdleBreakdown::other_s})
    p.idle.*cause += second.idle.*cause;
  for (const StepPartField& part : kStepParts) p.parts.*part.seconds += second.parts.*part.seconds;
  p.extrapolated = p.extrapolated || second.extrapolated;
}

void add_routing(const Case& config, const Routing& routing, Prediction& p) {
  if (!config.model.is_mixture()) return;
  p.expert_imbalance = expected_imbalance(routing, config.model, config.model.experts.count);
  if (config.layout.ep == 1) return;
  const std::vector<ExpertPlacement> placements = placements_of(config, routing, config.layout.ep);
  p.expert_rank_imbalance = expected_imbalance(routing, config.model, config.layout.ep, placements);
  if (!placements.empty()) p.expert_rank_imbalance_contiguous = expected_imbalance(routing, config.model, config.layout.ep);
}

void add_wire(const Case& config, const Plan& plan, const std::vector<Program>& programs, const Routing& routing, Prediction& p) {
  const auto routes = drawn(config, plan, programs, routing, false);
  add_wire_of(config, plan, routing, routes ? &*routes : nullptr, p);
}

Predicted predict(const Case& config, const Plan& plan, const std::vector<Program>& programs, int64_t arena_bytes,
                  const PlacedCostModel& costs, const Routing& routing) {
  Predicted out;
  SimulateOptions options;
  const auto routes = drawn(config, plan, programs, routing, options.individually(plan.mesh, config.machine));
  options.routes = routes ? &*routes : nullptr;
  out.trace = simulate(plan, programs, config.machine, costs, options);
  const int rank = longest_rank(out.trace);
  add_times(plan, step_seconds(out.trace), analyse(plan, programs, out.trace, rank, 0),
            idle_by_cause(plan, programs, out.trace, rank, 0), out.figures);
  out.figures.parts = scaled(parts_of_step(plan, programs, out.trace, rank, 0), 1.0 / plan.period);
  add_rest(config, plan, arena_bytes, costs, routing, options.routes, out.figures);
  return out;
}

Prediction predict_by_segments(const Case& config, const Plan& plan, const std::vector<Program>& programs, int64_t arena_bytes,
                               const PlacedCostModel& costs, const Routing& routing) {
  Prediction p;
  SegmentTimeline timeline(plan, programs, compute_on(config.machine));
  const auto routes = drawn(config, plan, programs, routing, false);
  if (routes) {
    const RoutedCosts routed(costs, routes->fullest(RowUse::kWorks), routes->fullest(RowUse::kExchanges));
    add_segment_times(plan, timeline, config.machine, routed, p);
  } else {
    add_segment_times(plan, timeline, config.machine, costs, p);
  }
  add_rest(config, plan, arena_bytes, costs, routing, routes ? &*routes : nullptr, p);
  return p;
}

}  // namespace shardlab::simulator
