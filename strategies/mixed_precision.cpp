// Mixed precision: parameters, activations and their gradients are stored in 16 bits, every kernel computes in fp32 and rounds its
// result once, and the optimizer updates fp32 copies of the parameters, which it rounds to what computes.
//
// `mixed_precision` narrows what the model's segments touch. Statistics stay fp32 (norms', the softmax's, the loss's), and so do
// the loss, the sums over sequences and a router's logits and weights. Gradients of parameters are stored, accumulated and reduced in `accumulate_dtype`: fp32
// unless the case says otherwise. A sum over ranks in 16 bits is rounded after every hop of a ring, once in `direct`.
// `master_weights` gives each update an fp32 copy of what it updates, a slice of it under ZeRO, from which moments take their type;
// after the update the copy is rounded into the parameter, and ZeRO gathers 16 bits.
//
// Shapes   as without
// Adds     no collective; activations, parameters and, where they are 16 bits, gradients travel at half the bytes
// Memory   2 bytes a parameter as it computes, 2 or 4 its gradient, 4 the copy and 8 AdamW's moments (ZeRO cuts each as it does
//          without): 16 with 16-bit gradients, as in fp32. Activations half, but for statistics
// Refuses  16-bit gradients without 16-bit parameters; another type to reduce than to accumulate
// Paper    Micikevicius et al., "Mixed ElementTypes Training" (2018); Kalamkar et al., "A Study of BFLOAT16" (2019)
#include "strategies/mixed_precision.h"

#include "plan/precision.h"
#include "plan/text.h"
#include "strategies/diloco.h"
#include "strategies/draft.h"
#include "strategies/optimizer.h"

namespace shardlab::strategies {
namespace {

bool is_statistic(const Slot& slot) {
  return slot.cls == BufferClass::kMetric || slot.name == "lse" || std::string_view(slot.name).ends_with(".stats");
}

/// Slots of the router's own numbers: logits, scores' weights, loads and bias. A choice that rounding decides would be another at
/// another layout, and frameworks route in fp32 too.
std::vector<SlotId> routing_slots(const Segment& segment) {
  std::vector<SlotId> slots;
  for (const Step& step : segment.steps) {
    const Op* op = std::get_if<Op>(&step);
    if (op == nullptr) continue;
    if (std::holds_alternative<Route>(op->work) || std::holds_alternative<ExpertLoad>(op->work) ||
        std::holds_alternative<ChooseExperts>(op->work)) {
      slots.insert(slots.end(), op->reads.begin(), op->reads.end());
      slots.insert(slots.end(), op->writes.begin(), op->writes.end());
    } else if (const auto* combine = std::get_if<Combine>(&op->work)) {
      slots.push_back(op->reads[combine->phase == Phase::kF ? 1 : 2]);
      if (combine->phase == Phase::kI) slots.push_back(op->writes[1]);
    }
  }
  return slots;
}

void narrow(DraftSegment& segment, const ElementTypes& precision) {
  const std::vector<SlotId> routing = routing_slots(segment.segment);
  for (size_t s = 0; s < segment.uses.size(); ++s) {
    Slot& slot = segment.segment.slots[s];
    if (slot.type.dtype != DType::f32 || is_statistic(slot)) continue;
    if (std::ranges::any_of(routing, [&](SlotId id) { return id.index() == s; })) continue;
    slot.type.dtype = segment.uses[s].use == Use::kGradient ? precision.gradient : precision.compute;
  }
}

}  // namespace

BufferId add_master(StageDraft& stage, BufferId value) {
  Buffer master = stage.role.buffers[value.index()];
  master.name += ".master";
  master.type.dtype = DType::f32;
  master.kind = BufferClass::kMaster;
  master.view.reset();
  master.persistent = true;
  return add_buffer(stage, std::move(master));
}

void mixed_precision(Draft& draft) {
  const ElementTypes precision = element_types(draft.config);
  for (UnitTemplate& unit : draft.templates) {
    narrow(unit.forward, precision);
    narrow(unit.backward, precision);
    for (UnitParameter& p : unit.parameters) p.type.dtype = precision.compute;
  }
  for (Parameter& p : draft.plan.parameters) p.type.dtype = precision.compute;
}

void master_weights(Draft& draft) {
  for (StageDraft& stage : draft.stages) {
    declare_updates(draft, stage);
    for (Update& update : stage.updates) {
      update.stored = update.value;
      update.value = add_master(stage, update.value);
      if (trains_apart(draft)) update.value = worker_view(draft, stage, update.value);
    }
  }
}

}  // namespace shardlab::strategies
