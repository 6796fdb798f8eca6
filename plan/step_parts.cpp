#include "plan/step_parts.h"

#include <algorithm>

#include "plan/trace_internal.h"

namespace shardlab {
namespace {

/// What an op's time counts for.
double StepParts::*part_of(const Plan& plan, const Instruction& i) {
  if (is_transfer(i)) return &StepParts::copies_s;
  if (is_communication(i)) {
    const CommId comm = std::visit(Overload{[](const Collective& c) { return c.comm; }, [](const Send& s) { return s.comm; },
                                            [](const Recv& r) { return r.comm; }, [](const auto&) { return CommId(); }},
                                   i.op->work);
    if (plan.comms[comm.index()].name == "ep") return &StepParts::expert_s;  // along cp too, where parts of sequences share experts
    const AxisSet axes = plan.comms[comm.index()].axes;
    const auto along = [&](std::string_view name) {
      const auto axis = plan.mesh.find(name);
      return axis && axes.contains(*axis);
    };
    if (std::holds_alternative<Send>(i.op->work) || std::holds_alternative<Recv>(i.op->work))
      return along("cp") ? &StepParts::context_s : along("tp") || along("etp") ? &StepParts::tensor_s : &StepParts::pipeline_s;
    // Gradients and weights travel along dp, whatever other axes they are shared on.
    if (along("dp")) return i.micro_batch >= 0 && along("ep") ? &StepParts::expert_s : &StepParts::data_s;
    if (along("ep")) return &StepParts::expert_s;
    if (along("tp") || along("etp")) return &StepParts::tensor_s;
    if (along("cp") || along("ulysses")) return &StepParts::context_s;
    return along("pp") ? &StepParts::pipeline_s : &StepParts::communication_s;
  }
  if (i.micro_batch < 0) return &StepParts::update_s;
  const bool backward = i.segment != nullptr && i.segment->name.find(".F") == std::string::npos;
  return backward && i.op != nullptr && phase_of(i.op->work) == Phase::kF ? &StepParts::recompute_s : &StepParts::compute_s;
}

}  // namespace

StepParts parts_of_step(const Plan& plan, const std::vector<Program>& programs, const Trace& trace, int rank, int step) {
  const Program& program = programs[role_of(plan.mesh, rank)];
  const Interval bounds = step_bounds(trace, rank, step);
  std::vector<const TraceEvent*> op_of(program.instructions.size(), nullptr);
  std::array<Intervals, kStepParts.size()> claims;
  const auto claim = [&](double StepParts::*part) -> Intervals& {
    const auto found = std::ranges::find(kStepParts, part, &StepPartField::seconds);
    return claims[static_cast<size_t>(found - kStepParts.begin())];
  };
  for (const TraceEvent& e : events_of(trace, rank))
    if (e.step == step && e.kind == TraceEvent::Kind::kOp) op_of[static_cast<size_t>(e.instruction)] = &e;
  for (const TraceEvent& e : events_of(trace, rank)) {
    if (e.step != step) continue;
    const Instruction& i = instruction_of(program, e);
    if (e.kind == TraceEvent::Kind::kWait) {
      claim(&StepParts::wait_s).push_back({e.begin, e.end});
      if (e.stream == 0)
        for (const Interval& bubble : bubble_of_wait(program, op_of, e)) claim(&StepParts::bubble_s).push_back(bubble);
      continue;
    }
    const double run = std::min(e.end, e.begin + e.peer_wait);
    claim(part_of(plan, i)).push_back({run, e.end});
    if (run > e.begin) claim(e.stream == 0 && is_receive(i) ? &StepParts::bubble_s : &StepParts::wait_s).push_back({e.begin, run});
  }
  StepParts parts;
  Intervals left{bounds};
  for (size_t k = 0; k < kStepParts.size(); ++k) {
    const Intervals own = unite(std::move(claims[k]), bounds);
    parts.*kStepParts[k].seconds = common(left, own);
    left = without(left, own);
  }
  const IdleBreakdown idle = idle_by_cause(plan, programs, trace, rank, step);
  parts.launch_s = std::min(length(left), idle.host_s + idle.latency_s);
  parts.unplanned_s = length(left) - parts.launch_s;
  return parts;
}

}  // namespace shardlab
