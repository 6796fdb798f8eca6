// Segments as the machine of rules 3 and 4 plays them. A segment is replayed in full once. Later calls skip what cannot differ
// between calls: its locals, and repeated reads.
#include <algorithm>
#include <string_view>

#include "plan/optimizers.h"
#include "plan/verify_replay.h"

namespace shardlab::verifying {
namespace {

std::string_view use_label(std::string_view label) {
  constexpr std::string_view kAgain = ".again";
  return label.ends_with(kAgain) ? label.substr(0, label.size() - kAgain.size()) : label;
}

}  // namespace

bool Language::decide(const Type& held, const Type& wanted, AxisSet cut) const {
  if (held.dtype != wanted.dtype || held.scale != wanted.scale || held.micro != wanted.micro) return false;
  const bool flat = wanted.shape.rank <= 1;
  for (size_t a = 0; a < plan.mesh.axes.size(); ++a) {
    const Placement h = held.place[a], w = wanted.place[a];
    if (cut.contains(static_cast<int>(a))) {  // each rank takes its part of what is whole, within the cuts that are there
      if (h.kind != Place::kReplicate || !(w.is_shard() || w.kind == Place::kLocal)) return false;
      for (size_t inner = a + 1; inner < plan.mesh.axes.size() && w.is_shard(); ++inner)
        if (!cut.contains(static_cast<int>(inner)) && plan.mesh.axes[inner].size > 1 && wanted.place[inner] == w) return false;
      continue;
    }
    if (h == w) continue;
    if (w.kind == Place::kLocal && (flat || h.kind == Place::kReplicate)) continue;
    // A flat buffer of state that was declared local: the windows on it say what they are, but a sum must be seen to be reduced.
    if (h.kind == Place::kLocal && held.shape.rank <= 1 && !w.is_partial()) continue;
    return false;
  }
  return true;
}

Act Language::act_of(const Segment& segment, const Op& op) const {
  Act act;
  act.op = &op;
  act.source = hash_text(use_label(op.label));
  const auto micro = [&](SlotId s) { return segment.slots[s.index()].type.micro; };
  const bool sums = std::ranges::any_of(op.writes, [&](SlotId s) { return micro(s) == Micro::kSum; });
  const auto* product = std::get_if<Linear>(&op.work);
  // A product in strips uses its weight once; that all strips read the same is proved with the rest of the chain rule.
  act.uses_parameters = phase_of(op.work) == Phase::kF && (product == nullptr || product->turn == 0);
  if (update_of(op.work) != nullptr)
    act.kind = Act::Kind::kOptimizer;
  else if (std::holds_alternative<Collective>(op.work) || std::holds_alternative<Copy>(op.work) || rounds(op.work))
    act.kind = Act::Kind::kTransfer;
  else if (std::holds_alternative<Add>(op.work) && sums)
    act.kind = Act::Kind::kAdd;
  else if (sums || std::holds_alternative<SquaredNorm>(op.work) ||
           (std::holds_alternative<Send>(op.work) && micro(op.reads[0]) == Micro::kSum))
    act.kind = Act::Kind::kSum;
  int32_t ordinal = 0;
  const size_t first = first_scales(op.work);
  const bool scaled = first != 0 && has_scales(segment.slots[op.reads[0].index()].type.dtype);
  for (const SlotId s : reads_with_predicate(op)) {
    const bool scales = scaled && (act.reads.size() == first || act.reads.size() == first + 1);
    act.reads.push_back(s.value);
    act.ordinals.push_back(micro(s) == Micro::kNone && !scales ? ordinal++ : -1);
  }
  for (const SlotId s : op.writes) act.writes.push_back(s.value);
  act.aliasing = aliasing_of(segment, op);
  return act;
}

Script Language::compile(const Segment& segment) {
  Script script;
  for (size_t s = 0; s < segment.slots.size(); ++s) {
    const Window w = window_of(segment, SlotId(static_cast<int32_t>(s)));
    const bool bound = segment.slots[static_cast<size_t>(w.root)].kind == SlotKind::kBound;
    script.slots.push_back({w, types.value(segment.slots[s].type), bound});
  }
  for (const Step& step : segment.steps) {
    Act act;
    if (const Op* op = std::get_if<Op>(&step)) {
      act = act_of(segment, *op);
    } else if (const auto* alloc = std::get_if<AllocSlot>(&step)) {
      act.kind = Act::Kind::kAlloc;
      act.writes = {alloc->slot.value};
    } else {
      act.kind = Act::Kind::kFree;
      act.writes = {std::get<FreeSlot>(step).slot.value};
    }
    script.full.push_back(std::move(act));
  }
  lighten(segment, script);
  return script;
}

/// Leaves out the parts that every call does alike: locals that carry no sum over micro-batches and no parameter, and reads of a
/// slot that was read just before.
void Language::lighten(const Segment& segment, Script& script) const {
  std::vector<bool> kept(segment.slots.size());
  for (size_t s = 0; s < kept.size(); ++s)
    kept[s] = script.slots[s].bound || segment.slots[static_cast<size_t>(script.slots[s].window.root)].type.micro == Micro::kSum ||
              segment.slots[s].type.micro == Micro::kSum;
  for (const Act& act : script.full)
    if (act.op != nullptr && rounds(act.op->work) && segment.slots[act.op->reads[0].index()].type.micro == Micro::kNone)
      for (const int32_t w : act.writes) kept[static_cast<size_t>(script.slots[static_cast<size_t>(w)].window.root)] = true;
  std::vector<bool> read(segment.slots.size());
  for (const Act& act : script.full) {
    Act light = act;
    // Of what must not share storage the first call is taken as the pattern; what must is looked at in every call.
    std::erase_if(light.aliasing, [](const Aliasing& a) { return a.kind == Aliasing::Kind::kMustNot; });
    const bool whole =
        act.kind != Act::Kind::kPlain && act.kind != Act::Kind::kAlloc && act.kind != Act::Kind::kFree &&
        (std::holds_alternative<SquaredNorm>(act.op->work) ||
         std::ranges::all_of(act.writes, [&](int32_t s) { return kept[static_cast<size_t>(s)]; })) &&
        std::ranges::all_of(act.reads, [&](int32_t s) { return kept[static_cast<size_t>(s)] || act.kind == Act::Kind::kSum; });
    if (!whole && light.kind != Act::Kind::kAlloc && light.kind != Act::Kind::kFree) light.kind = Act::Kind::kPlain;
    light.reads.clear();
    light.ordinals.clear();
    for (size_t i = 0; i < act.reads.size(); ++i) {
      const auto s = static_cast<size_t>(act.reads[i]);
      if (!kept[s]) continue;
      const bool again = light.kind == Act::Kind::kPlain && !light.uses_parameters && read[s];
      read[s] = true;
      if (again) continue;
      light.reads.push_back(act.reads[i]);
      light.ordinals.push_back(act.ordinals[i]);
    }
    std::erase_if(light.writes, [&](int32_t s) { return !kept[static_cast<size_t>(s)]; });
    for (const int32_t w : light.writes)
      for (size_t s = 0; s < read.size(); ++s)
        if (script.slots[s].window.root == script.slots[static_cast<size_t>(w)].window.root) read[s] = false;
    if (!light.reads.empty() || !light.writes.empty()) script.light.push_back(std::move(light));
  }
}

}  // namespace shardlab::verifying
