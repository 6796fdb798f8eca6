// Activation offload: what a layer's forward leaves for its backward (its input, and what it saves) waits in host memory.
//
// With `overlap` a layer is copied out on a stream of its own while the next unit computes, and its device storage is given up
// when that unit is done; it is copied back on another stream while the unit before it in backward computes. So the device holds
// the layer that computes, one on its way out or one on its way in, and those that are needed again before anything else could use
// their place: a layer stays where fewer than one unit would compute while it is away (the last layer before the head, whose
// backward comes at once). Without overlap the same layers are copied on the compute stream, right after their forward and right
// before their backward, and nothing computes meanwhile.
//
// The copies keep every bit, and every op reads what it would have read.
//
// Shapes   as without
// Adds     per parked layer and micro-batch a copy to the host and one back of all that the layer keeps: 16 b s h + b s (a + 4)
//          elements of a GPT layer, b s h under full recompute
// Memory   device: activations of two or three layers, whatever the depth; host: those of the rest, times micro-batches in flight
// Refuses  NVMe (`check`)
// Paper    Rhu et al., "vDNN" (2016), section 3; Rajbhandari et al., "ZeRO-Infinity" (2021), section 5.1.2
#include "strategies/offload_activations.h"

#include <fmt/format.h>

#include <map>

#include "plan/treatment.h"

namespace shardlab {
namespace {

constexpr std::string_view kName = "offload-activations";
/// Computing events between the one with which device storage is given up and the one with which it is taken again.
constexpr size_t kAway = 1;

class Parking {
 public:
  Parking(const Draft& draft, StageDraft& stage)
      : draft_(draft), stage_(stage), overlap_(draft.config.layout.overlap), treatments_(treatments_of(draft.config)) {
    for (size_t i = 0; i < stage_.events.size(); ++i)
      if (stage_.events[i].computes()) computing_.push_back(i);
  }

  void run() {
    std::map<std::pair<int, int>, size_t> forward;  // by unit and micro-batch, as a place among what computes
    for (size_t n = 0; n < computing_.size(); ++n) {
      const Event& e = stage_.events[computing_[n]];
      const Unit& unit = draft_.units[static_cast<size_t>(e.unit)];
      if (unit.kind != UnitKind::kLayer || !treatments_[static_cast<size_t>(unit.layer)].parked) continue;
      if (e.kind == Event::Kind::kForward)
        forward[{e.unit, e.micro_batch}] = n;
      else if (const size_t f = forward.at({e.unit, e.micro_batch}); (f + 1) + kAway < n - 1)
        park(e.unit, e.micro_batch, f, n);
    }
    insertions_.apply(stage_.events);
  }

 private:
  void park(int unit, int micro_batch, size_t forward, size_t backward) {
    const auto event = [&](Event::Kind kind) { return Event{.kind = kind, .unit = unit, .micro_batch = micro_batch}; };
    insertions_.after(computing_[forward], event(Event::Kind::kPark));
    if (overlap_)
      insertions_.release_after(computing_[forward + 1], event(Event::Kind::kVacate));
    else
      insertions_.after(computing_[forward], event(Event::Kind::kVacate));
    insertions_.before(computing_[overlap_ ? backward - 1 : backward], event(Event::Kind::kFetch));
    insertions_.release_after(computing_[backward], event(Event::Kind::kForget));
  }

  const Draft& draft_;
  StageDraft& stage_;
  const bool overlap_;
  const std::vector<LayerTreatment> treatments_;  ///< by layer of the model
  std::vector<size_t> computing_;                 ///< events that compute, in order
  Insertions insertions_;
};

}  // namespace

std::vector<SlotId> parked_slots(const DraftSegment& backward) {
  std::vector<SlotId> slots;
  for (size_t s = 0; s < backward.uses.size(); ++s)
    if (backward.uses[s].use == Use::kActivationIn || backward.uses[s].use == Use::kSaved)
      slots.emplace_back(static_cast<int32_t>(s));
  return slots;
}

Slot host_slot(Slot slot) {
  slot.name += ".host";
  slot.space = Space::kHost;
  return slot;
}

SegmentId parking_segment(Draft& draft, int unit, bool out) {
  // Layers that differ in what backward makes again keep different tensors.
  const size_t form = draft.units[static_cast<size_t>(unit)].form;
  const std::string kind = out ? "park.layer" : "fetch.layer";
  const std::string name = form == static_cast<size_t>(UnitKind::kLayer) ? kind : fmt::format("{}.{}", kind, form);
  return draft.cached(name, [&] {
    const DraftSegment& backward = draft.of_unit(unit).backward;
    const bool overlap = draft.config.layout.overlap;
    Segment segment;
    segment.name = name;
    for (const SlotId id : parked_slots(backward)) {
      const Slot& device = backward.slot(id);
      const SlotId here(static_cast<int32_t>(segment.slots.size())), there(here.value + 1);
      segment.slots.insert(segment.slots.end(), {device, host_slot(device)});
      Op op;
      op.work = Copy{};
      op.reads = {out ? here : there};
      op.writes = {out ? there : here};
      if (overlap) op.stream = draft.stream(out ? "d2h" : "h2d");
      op.label = device.name;
      op.strategy = kName;
      segment.steps.emplace_back(std::move(op));
    }
    return segment;
  });
}

void offload_activations(Draft& draft) {
  for (StageDraft& stage : draft.stages) Parking(draft, stage).run();
}

}  // namespace shardlab
