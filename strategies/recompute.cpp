// Full recompute (activation checkpointing): a layer saves nothing but its input, and backward runs the layer's forward again
// for what it needs. Ops of forward whose results backward does not need (the last projection and residual) are not repeated.
//
// Shapes   as without
// Adds     per layer one forward less its last matmul; under tensor parallelism the all-reduces of the ops that are repeated
// Memory   per layer and micro-batch in flight: b*s*h (the input); one layer's activations while its backward runs
// Refuses  nothing
// Paper    Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016)
#include "strategies/recompute.h"

#include <algorithm>
#include <set>

#include "strategies/draft.h"

namespace shardlab {
namespace {

constexpr std::string_view kName = "full-recompute";

/// The forward ops that make some slot of `needed`, in order; `needed` grows by what they read.
std::vector<Op> ops_that_make(const DraftSegment& forward, std::set<int32_t> needed) {
  const auto root = [&](SlotId slot) {
    const auto& view = forward.slot(slot).view;
    return view ? view->base : slot.value;
  };
  std::vector<Op> ops;
  for (auto step = forward.segment.steps.rbegin(); step != forward.segment.steps.rend(); ++step) {
    const Op& op = std::get<Op>(*step);
    if (std::ranges::none_of(op.writes, [&](SlotId w) { return needed.contains(root(w)); })) continue;
    for (const SlotId r : op.reads) needed.insert(root(r));
    ops.push_back(op);
  }
  std::ranges::reverse(ops);
  return ops;
}

}  // namespace

void full_recompute(Draft& draft) {
  UnitTemplate& layer = draft.of(UnitKind::kLayer);
  DraftSegment& forward = layer.forward;
  DraftSegment& backward = layer.backward;

  std::set<int32_t> needed;
  for (size_t s = 0; s < backward.uses.size(); ++s)
    if (backward.uses[s].use == Use::kSaved) needed.insert(forward.find(backward.segment.slots[s].name).value);
  std::vector<Op> again = ops_that_make(forward, needed);

  // What was saved is made anew in backward and lives only there.
  for (DraftSegment* segment : {&forward, &backward})
    for (size_t s = 0; s < segment->uses.size(); ++s)
      if (segment->uses[s].use == Use::kSaved) {
        segment->uses[s].use = Use::kLocal;
        segment->segment.slots[s].kind = SlotKind::kLocal;
        segment->segment.slots[s].cls = BufferClass::kTemporary;
      }

  const auto in_backward = [&](SlotId slot) {
    const Slot& f = forward.slot(slot);
    if (const auto found = backward.find_if(f.name)) return *found;
    if (f.view) return backward.add_view(f.name, backward.find(forward.slot(SlotId(f.view->base)).name), f.type);
    const SlotUse use = forward.uses[slot.index()];
    return backward.add(f.name, f.type, use.use, f.cls, use.parameter);
  };
  // Bases before their views, so that each view finds its base.
  for (Op& op : again)
    for (const auto* operands : {&op.reads, &op.writes})
      for (const SlotId slot : *operands)
        if (const auto& view = forward.slot(slot).view) in_backward(SlotId(view->base));
  for (Op& op : again) {
    for (auto* operands : {&op.reads, &op.writes})
      for (SlotId& slot : *operands) slot = in_backward(slot);
    op.strategy = kName;
    op.label += ".again";
  }
  backward.segment.steps.insert(backward.segment.steps.begin(), std::make_move_iterator(again.begin()),
                                std::make_move_iterator(again.end()));
}

}  // namespace shardlab
