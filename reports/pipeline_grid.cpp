#include "reports/pipeline_grid.h"

#include <algorithm>
#include <cstdlib>

namespace shardlab::reports {
namespace {

bool communicates(const Op& op) {
  return std::holds_alternative<Collective>(op.work) || std::holds_alternative<Send>(op.work) ||
         std::holds_alternative<Recv>(op.work);
}

/// The phase of a call by its segment's name: "layer.B.accumulate" is B, "layer.I" I; of no micro-batch U.
char phase_of_call(const Instruction& i) {
  if (i.micro_batch < 0) return 'U';
  const std::string& name = i.segment->name;
  const size_t dot = name.find('.');
  const std::string half = dot == std::string::npos ? "" : name.substr(dot + 1, name.find('.', dot + 1) - dot - 1);
  return half == "B" || half == "I" || half == "W" ? half[0] : 'F';
}

}  // namespace

std::vector<GridSlot> grid_slots(const Plan& plan, const std::vector<Program>& programs, const Trace& trace, int rank, int step,
                                 double origin) {
  const Program& program = programs[static_cast<size_t>(plan.mesh.role_of(rank))];
  std::vector<const TraceEvent*> events;
  for (const TraceEvent& e : trace.events)
    if (e.rank == rank && e.step == step && e.kind == TraceEvent::Kind::kOp && e.stream == 0 && e.end > e.begin)
      events.push_back(&e);
  std::ranges::stable_sort(events, {}, &TraceEvent::begin);
  std::vector<GridSlot> slots;
  int layer = -1;  // of the op before
  for (const TraceEvent* e : events) {
    const Instruction& i = program.instructions[static_cast<size_t>(e->instruction)];
    if (i.op == nullptr || i.segment == nullptr || communicates(*i.op)) continue;
    const char phase = phase_of_call(i);
    // Another part of the model, as stages of several parts have them, begins where the layer leaps.
    const bool leaps = i.layer >= 0 && layer >= 0 && std::abs(i.layer - layer) > 1 && phase != 'U';
    if (slots.empty() || slots.back().micro_batch != i.micro_batch || slots.back().phase != phase || leaps) {
      slots.push_back({phase, i.micro_batch, i.layer, e->begin - origin, e->end - origin});
      layer = -1;
    }
    GridSlot& slot = slots.back();
    slot.end_s = std::max(slot.end_s, e->end - origin);
    if (slot.layer < 0) slot.layer = i.layer;
    if (i.layer >= 0) layer = i.layer;
  }
  return slots;
}

}  // namespace shardlab::reports
