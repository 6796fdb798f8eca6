#include "interop/held_buffers.h"

#include <algorithm>

#include "plan/text_names.h"
#include "plan/trace_internal.h"

namespace shardlab::interop {
namespace {

HeldBuffer held(const Buffer& b, int64_t offset) { return {b.name, name_of(b.kind), offset, aligned(b.type.bytes())}; }

/// The storage that an instruction allocates or frees; nothing in another space than the device's.
bool find_storage(const Plan& plan, const Program& program, const ArenaLayout& arena, const Instruction& i, HeldBuffer& found) {
  if (static_cast<bool>(i.buffer)) {
    const Buffer& b = plan.roles[static_cast<size_t>(i.role)].buffers[i.buffer.index()];
    found = held(b, arena.buffers[i.buffer.index()]);
    return b.space == Space::kDevice;
  }
  const LocalBuffer& local = program.locals[static_cast<size_t>(i.local)];
  const bool named = i.segment != nullptr && static_cast<bool>(local.slot);
  found = {named ? i.segment->slots[local.slot.index()].name : "local", name_of(local.cls),
           arena.locals[static_cast<size_t>(i.local)], local.bytes};
  return local.space == Space::kDevice;
}

}  // namespace

std::vector<HeldBuffer> persistent_buffers(const Plan& plan, const Program& program, const ArenaLayout& arena) {
  std::vector<HeldBuffer> list;
  const Role& role = plan.roles[static_cast<size_t>(program.role)];
  for (size_t i = 0; i < role.buffers.size(); ++i) {
    const Buffer& b = role.buffers[i];
    if (b.persistent && !b.view && b.space == Space::kDevice) list.push_back(held(b, arena.buffers[i]));
  }
  std::ranges::stable_sort(list, {}, &HeldBuffer::offset);
  return list;
}

std::vector<BufferChange> buffer_changes(const Plan& plan, const Program& program, const ArenaLayout& arena, const Trace& trace,
                                         int rank, int step) {
  std::vector<double> ends(program.instructions.size(), 0);
  for (const TraceEvent& e : events_of(trace, rank))
    if (e.step == step && e.kind == TraceEvent::Kind::kOp && e.stream == 0) ends[static_cast<size_t>(e.instruction)] = e.end;
  std::vector<BufferChange> changes;
  double now = 0;
  for (const Instruction& i : program.instructions) {
    now = std::max(now, ends[static_cast<size_t>(i.id)]);
    if (i.kind == Instruction::Kind::kRun) continue;
    BufferChange change{i.kind == Instruction::Kind::kFree, {}, now, describe(plan, i), i.id};
    if (find_storage(plan, program, arena, i, change.buffer) && change.buffer.bytes > 0) changes.push_back(std::move(change));
  }
  return changes;
}

}  // namespace shardlab::interop
