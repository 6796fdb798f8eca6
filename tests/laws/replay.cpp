#include "tests/laws/replay.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "plan/collective_steps.h"
#include "plan/program.h"
#include "plan/wire.h"
#include "strategies/lower.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

/// Live bytes of a role in one space while its instructions are read in issue order.
struct Replay {
  MemoryByClass live, at_peak;
  int64_t peak = 0, persistent = 0;
  void change(BufferClass cls, int64_t bytes) {
    live.bytes[static_cast<size_t>(cls)] += bytes;
    if (live.total() > peak) peak = live.total(), at_peak = live;
  }
};

std::array<Replay, kSpaces> replay(const Plan& plan, int role_index) {
  const Role& role = plan.roles[static_cast<size_t>(role_index)];
  const Program program = expand_program(plan, role_index);
  std::array<Replay, kSpaces> spaces;
  for (const Buffer& b : role.buffers)
    if (b.persistent && !b.view) spaces[static_cast<size_t>(b.space)].change(b.kind, aligned(b.type.bytes()));
  for (Replay& r : spaces) r.persistent = r.live.total();
  std::set<std::pair<int32_t, int32_t>> there;  // buffer and local
  for (const Instruction& i : program.instructions) {
    if (i.kind == Instruction::Kind::kRun) continue;
    const bool alloc = i.kind == Instruction::Kind::kAlloc;
    const std::pair<int32_t, int32_t> key{i.local < 0 ? i.buffer.value : -1, i.local};
    REQUIRE((alloc ? there.insert(key).second : there.erase(key) == 1));
    if (i.local >= 0) {
      const LocalBuffer& local = program.locals[static_cast<size_t>(i.local)];
      spaces[static_cast<size_t>(local.space)].change(local.cls, alloc ? local.bytes : -local.bytes);
    } else {
      const Buffer& b = role.buffers[i.buffer.index()];
      spaces[static_cast<size_t>(b.space)].change(b.kind, (alloc ? 1 : -1) * aligned(b.type.bytes()));
    }
  }
  return spaces;
}

/// Bytes that a whole group sends by one op, and how many ranks it has. A group may have ranks of several roles.
std::pair<int64_t, int64_t> sent_by(const Plan& plan, const Segment& segment, const Op& op) {
  const auto bytes = [&](SlotId s) { return segment.slots[s.index()].type.bytes(); };
  if (std::holds_alternative<Send>(op.work)) return {bytes(op.reads.at(0)), 1};
  const auto& c = std::get<Collective>(op.work);
  const int64_t size = group_size(plan.mesh, plan.comms[c.comm.index()]);
  const bool gathers = c.kind == CollectiveKind::kAllGather, reduces = c.kind == CollectiveKind::kAllReduce;
  const int64_t whole = bytes(gathers ? op.writes.at(0) : op.reads.at(0));
  if (reduces || gathers || c.kind == CollectiveKind::kReduceScatter) return {(reduces ? 2 : 1) * (size - 1) * whole, size};
  // Rows of experts: a rank has room for those of all, and sends its own. On their way back they are what was sent.
  const bool rows = op.reads.size() == 3;
  const bool back = rows && bytes(op.reads[0]) > bytes(op.writes.at(0));
  const Type& type = segment.slots[(back ? op.writes[0] : op.reads.at(0)).index()].type;
  if (rows) return {(size - 1) * type.bytes(), size};
  int64_t elements = 0;
  for (int rank = 0; rank < size; ++rank)
    elements += sent_elements(c.kind, c.algorithm, type.shape.elements(), static_cast<int>(size), rank, c.root);
  return {elements * (whole / type.shape.elements()), size};
}

std::map<std::string, int64_t> replayed_wire(const Plan& plan) {
  std::map<std::pair<std::string, int64_t>, int64_t> by_size;  // bytes of a group, as often as one of its ranks takes part
  const int64_t ranks = plan.mesh.world_size() / static_cast<int64_t>(plan.roles.size());
  for (const Role& role : plan.roles)
    for (const Item& item : role.program) {
      const Call* call = std::get_if<Call>(&item);
      if (call == nullptr) continue;
      const Segment& segment = plan.segments[call->segment.index()];
      for (const Step& step : segment.steps) {
        const Op* op = std::get_if<Op>(&step);
        if (op == nullptr) continue;
        const auto* c = std::get_if<Collective>(&op->work);
        const auto* s = std::get_if<Send>(&op->work);
        if (c == nullptr && s == nullptr) continue;
        const auto [bytes, size] = sent_by(plan, segment, *op);
        by_size[{plan.comms[(c != nullptr ? c->comm : s->comm).index()].name, size}] += bytes * ranks;
      }
    }
  std::map<std::string, int64_t> sent;
  for (const auto& [key, bytes] : by_size)
    if (bytes != 0) sent[key.first] += bytes / key.second;
  return sent;
}

}  // namespace

std::string difference_from_replay(const Plan& plan) {
  for (size_t stage = 0; stage < plan.roles.size(); ++stage) {
    const auto folded = memory_peak(plan, static_cast<int>(stage));
    const auto read = replay(plan, static_cast<int>(stage));
    for (size_t space = 0; space < kSpaces; ++space) {
      const MemoryPeak& fold = folded[space];
      const Replay& naive = read[space];
      if (fold.at_peak.bytes != naive.at_peak.bytes || fold.peak_bytes != naive.peak || fold.persistent_bytes != naive.persistent)
        return fmt::format("stage {}, {}, at {}: {} bytes by class, {} persistent by the fold; {} and {} replayed", stage,
                           name_of(static_cast<Space>(space)), fold.moment, fmt::join(fold.at_peak.bytes, " "),
                           fold.persistent_bytes, fmt::join(naive.at_peak.bytes, " "), naive.persistent);
    }
  }
  auto folded = total_wire_bytes(plan);
  std::erase_if(folded, [](const auto& entry) { return entry.second == 0; });
  const auto read = replayed_wire(plan);
  const auto listed = [](const std::map<std::string, int64_t>& channels) {
    std::string text;
    for (const auto& [name, bytes] : channels) text += fmt::format(" {} {} B", name, bytes);
    return text;
  };
  return folded == read ? "" : fmt::format("wire:{} by the fold,{} replayed", listed(folded), listed(read));
}

int64_t standing_bytes(const Plan& plan, int stage, BufferClass cls) {
  const Role& role = plan.roles[static_cast<size_t>(stage)];
  int64_t bytes = 0;
  const auto add = [&](const Buffer& b) {
    if (!b.view && b.kind == cls && b.space == Space::kDevice) bytes += aligned(b.type.bytes());
  };
  for (const Buffer& b : role.buffers)
    if (b.persistent) add(b);
  for (const Item& item : role.program) {
    const Alloc* a = std::get_if<Alloc>(&item);
    if (a == nullptr) break;
    add(role.buffers[a->buffer.index()]);
  }
  return bytes;
}

std::map<std::string, int64_t> kept_by_layer(const Plan& plan) {
  std::map<std::string, int64_t> kept;
  for (const Segment& segment : plan.segments) {
    if (segment.name != "layer.F") continue;
    const auto change = [&](SlotId id, int sign) {
      const Slot& slot = segment.slots[id.index()];
      if (slot.cls == BufferClass::kActivation) kept[slot.name] += sign * aligned(slot.type.bytes());
    };
    for (const Step& step : segment.steps) {
      if (const auto* a = std::get_if<AllocSlot>(&step)) change(a->slot, 1);
      if (const auto* f = std::get_if<FreeSlot>(&step)) change(f->slot, -1);
    }
  }
  std::erase_if(kept, [](const auto& entry) { return entry.second == 0; });
  return kept;
}

int64_t kept_bytes_of_layer(const Plan& plan) {
  int64_t sum = 0;
  for (const auto& [slot, bytes] : kept_by_layer(plan)) sum += bytes;
  return sum;
}

int64_t peak_of_case(const Case& c) {
  const auto plan = strategies::lower(c, {.after = {}, .verify = false});
  REQUIRE(plan.ok());
  int64_t peak = 0;
  for (size_t role = 0; role < plan->roles.size(); ++role)
    peak = std::max(peak, memory_peak(*plan, static_cast<int>(role))[static_cast<size_t>(Space::kDevice)].peak_bytes);
  return peak;
}

}  // namespace shardlab::testing
