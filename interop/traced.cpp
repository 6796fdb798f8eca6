#include "interop/traced.h"

#include <fmt/format.h>

#include <algorithm>

#include "plan/trace_internal.h"

namespace shardlab::interop {

std::vector<int> traced_ranks(const Trace& trace) {
  std::vector<int> ranks;
  for (const TraceEvent& e : trace.events)
    if (ranks.empty() || ranks.back() != e.rank) ranks.push_back(e.rank);
  return ranks;
}

std::vector<double> step_starts(const Trace& trace) {
  std::vector<double> starts{0};
  for (int step = 0; step < trace.steps; ++step) {
    double end = 0;
    for (int rank = 0; rank < trace.world_size; ++rank) end = std::max(end, step_bounds(trace, rank, step)[1]);
    starts.push_back(starts.back() + end);
  }
  return starts;
}

std::string_view copy_name(const Instruction& i) {
  const auto space = [&](SlotId slot) { return i.segment->slots[slot.index()].space; };
  if (space(i.op->reads.front()) == Space::kDevice) return "Memcpy DtoH";
  return space(i.op->writes.front()) == Space::kDevice ? "Memcpy HtoD" : "Memcpy HtoH";
}

std::string op_name(const Instruction& i) {
  if (i.op == nullptr) return i.kind == Instruction::Kind::kAlloc ? "alloc" : "free";
  return fmt::format("{} {}", kind_of(i.op->work), i.op->label);
}

}  // namespace shardlab::interop
