// Helpers shared by the folds over traces.
#pragma once

#include <algorithm>
#include <span>
#include <variant>
#include <vector>

#include "plan/base/check.h"
#include "plan/intervals.h"
#include "plan/program.h"
#include "plan/trace.h"

namespace shardlab {

inline bool is_receive(const Instruction& i) { return i.op != nullptr && std::holds_alternative<Recv>(i.op->work); }

inline bool is_communication(const Instruction& i) {
  return i.op != nullptr && (std::holds_alternative<Collective>(i.op->work) || std::holds_alternative<Send>(i.op->work) ||
                             std::holds_alternative<Recv>(i.op->work));
}

/// A copy from one memory space to another: it keeps a copy engine or a drive busy, and no multiprocessor.
inline bool is_transfer(const Instruction& i) {
  if (i.op == nullptr || !std::holds_alternative<Copy>(i.op->work)) return false;
  const auto space = [&](SlotId slot) { return i.segment->slots[slot.index()].space; };
  return space(i.op->reads.front()) != space(i.op->writes.front());
}

/// Index of the role of a rank.
inline size_t role_of(const Mesh& mesh, int rank) { return static_cast<size_t>(mesh.role_of(rank)); }

inline const Instruction& instruction_of(const Program& program, const TraceEvent& event) {
  SHARDLAB_CHECK(event.instruction >= 0 && static_cast<size_t>(event.instruction) < program.instructions.size(),
                 "a trace event names instruction {} of {}", event.instruction, program.instructions.size());
  return program.instructions[static_cast<size_t>(event.instruction)];
}

/// The events of one rank, over all steps.
inline std::span<const TraceEvent> events_of(const Trace& trace, int rank) {
  const auto by_rank = [](const TraceEvent& a, int r) { return a.rank < r; };
  const auto first = std::lower_bound(trace.events.begin(), trace.events.end(), rank, by_rank);
  const auto last = std::find_if(first, trace.events.end(), [rank](const TraceEvent& e) { return e.rank != rank; });
  return {first, last};
}

/// The part of the wait `event` of the compute stream in which a receive that it waited for had no sender yet: none
/// or one interval.
inline Intervals bubble_of_wait(const Program& program, const std::vector<const TraceEvent*>& op_of, const TraceEvent& event) {
  const TraceEvent* last = nullptr;  // the dependency that finished last: what the stream really waited for
  for (const Wait& wait : program.waits_of(instruction_of(program, event))) {
    const auto& stream = program.streams[static_cast<size_t>(wait.stream)];
    const TraceEvent* done = op_of[static_cast<size_t>(stream[static_cast<size_t>(wait.count - 1)])];
    if (done != nullptr && (last == nullptr || done->end > last->end)) last = done;
  }
  if (last == nullptr || !is_receive(instruction_of(program, *last))) return {};
  return {{event.begin, std::min(event.end, last->begin + last->peer_wait)}};
}

/// Begin and end of a step on a rank.
inline Interval step_bounds(const Trace& trace, int rank, int step) {
  const size_t row = static_cast<size_t>(step) * static_cast<size_t>(trace.world_size) + static_cast<size_t>(rank);
  SHARDLAB_CHECK(rank < trace.world_size && row < trace.step_interval.size(), "the trace has no step {} of rank {}", step, rank);
  return trace.step_interval[row];
}

}  // namespace shardlab
