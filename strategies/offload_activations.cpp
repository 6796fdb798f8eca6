// Activation offload: what a layer's forward leaves for its backward (its input, and what it saves) waits in host memory,
// or on NVMe.
//
// With `overlap` a layer is copied out on a stream of its own while the next unit computes, and its device storage is given up
// when that unit is done; it is copied back on another stream while the unit before it in backward computes. So the device holds
// the layer that computes, one on its way out or one on its way in, and those that are needed again before anything else could use
// their place: a layer stays where fewer than one unit would compute while it is away (the last layer before the head, whose
// backward comes at once). Without overlap the same layers are copied on the compute stream, right after their forward and right
// before their backward, and nothing computes meanwhile.
//
// On the way to NVMe and back a layer passes through host memory, on two more streams ("nvme.write", "nvme.read"). It is written
// while up to two units compute, then its place in host memory is the next layer's; it is read while the unit before the last one
// before its backward computes. Two layers' worth of host memory serve the whole depth: a ring, since what is given up is taken
// next. A layer stays on the device where it would have to be read before it is written.
//
// The copies keep every bit, and every op reads what it would have read.
//
// Shapes   as without
// Adds     per parked layer and micro-batch a copy to the host and one back of all that the layer keeps: 16 b s h + b s (a + 4)
//          elements of a GPT layer, b s h under full recompute; with NVMe a write and a read of as much
// Memory   device: activations of two or three layers, whatever the depth; host: those of the rest, times micro-batches in flight;
//          with NVMe those are in files, and the host has two or three layers of one micro-batch
// Refuses  recompute of every k-th layer (`check`)
// Paper    Rhu et al., "vDNN" (2016), section 3; Rajbhandari et al., "ZeRO-Infinity" (2021), sections 5.1.2 and 6.3
#include "strategies/offload_activations.h"

#include <fmt/format.h>

#include <map>

#include "plan/treatment.h"

namespace shardlab::strategies {
namespace {

constexpr std::string_view kOffloadActivationsName = "offload-activations";
/// Computing events between the one with which device storage is given up and the one with which it is taken again.
constexpr size_t kAway = 1;

class Parking {
 public:
  Parking(const Draft& draft, StageDraft& stage)
      : draft_(draft),
        stage_(stage),
        overlap_(draft.config.layout.overlap),
        nvme_(draft.config.layout.offload.activations == OffloadTo::kNvme),
        treatments_(treatments_of(draft.config)) {
    for (size_t i = 0; i < stage_.events.size(); ++i)
      if (stage_.events[i].computes()) computing_.push_back(i);
  }

  void run() {
    std::map<std::pair<int, int>, size_t> forward;  // by unit and micro-batch, as a place among what computes
    for (size_t n = 0; n < computing_.size(); ++n) {
      const Event& e = stage_.events[computing_[n]];
      const Unit& unit = draft_.units[static_cast<size_t>(e.unit)];
      if (!is_layer(unit.kind) || !treatments_[static_cast<size_t>(unit.layer)].parked) continue;
      if (e.kind == Event::Kind::kForward) forward[{e.unit, e.micro_batch}] = n;
      if (!e.goes_back()) continue;
      if (const size_t f = forward.at({e.unit, e.micro_batch}); leaves(f, n)) park(e.unit, e.micro_batch, f, n);
    }
    insertions_.apply(stage_.events);
  }

 private:
  /// Whether a layer is away long enough: at the least one unit, and on NVMe no less than it takes to be written.
  bool leaves(size_t forward, size_t backward) const {
    return (forward + 1) + kAway < backward - 1 && !(nvme_ && overlap_ && forward + 2 >= backward - 2);
  }

  void park(int unit, int micro_batch, size_t forward, size_t backward) {
    const auto event = [&](Event::Kind kind) { return Event{.kind = kind, .unit = unit, .micro_batch = micro_batch}; };
    using Kind = Event::Kind;
    insertions_.after(computing_[forward], event(Kind::kPark));
    if (overlap_) {
      insertions_.release_after(computing_[forward + 1], event(Kind::kVacate));
      if (nvme_) {
        insertions_.release_after(computing_[forward + 2], event(Kind::kUnstage));
        insertions_.before(computing_[backward - 2], event(Kind::kRead));
      }
      insertions_.before(computing_[backward - 1], event(Kind::kFetch));
      if (nvme_) insertions_.release_after(computing_[backward - 1], event(Kind::kUnstage));
    } else {
      insertions_.after(computing_[forward], event(Kind::kVacate));
      if (nvme_) {
        insertions_.after(computing_[forward], event(Kind::kUnstage));
        insertions_.before(computing_[backward], event(Kind::kRead));
      }
      insertions_.before(computing_[backward], event(Kind::kFetch));
      if (nvme_) insertions_.before(computing_[backward], event(Kind::kUnstage));
    }
    insertions_.release_after(computing_[backward], event(Kind::kForget));
  }

  const Draft& draft_;
  StageDraft& stage_;
  const bool overlap_;
  const bool nvme_;
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

Slot nvme_slot(Slot slot) {
  slot.name += ".nvme";
  slot.space = Space::kNvme;
  return slot;
}

SegmentId parking_segment(Draft& draft, int unit, Event::Kind kind) {
  using Kind = Event::Kind;
  // Layers of several kinds, and those that differ in what backward makes again, keep different tensors.
  const std::string& forward = draft.of_unit(unit).forward.segment.name;  // "layer.F", "layer.again.F"
  const char* what = kind == Kind::kPark ? "park" : kind == Kind::kRead ? "read" : "fetch";
  const std::string name = fmt::format("{}.{}", what, forward.substr(0, forward.rfind('.')));
  return draft.cached(name, [&] {
    const DraftSegment& backward = draft.of_unit(unit).backward;
    const bool overlap = draft.config.layout.overlap, nvme = draft.config.layout.offload.activations == OffloadTo::kNvme;
    Segment segment;
    segment.name = name;
    const auto add = [&](Slot slot) {
      segment.slots.push_back(std::move(slot));
      return SlotId(static_cast<int32_t>(segment.slots.size()) - 1);
    };
    const auto copy = [&](SlotId from, SlotId to, std::string_view stream, const std::string& label) {
      Op op;
      op.work = Copy{};
      op.reads = {from};
      op.writes = {to};
      if (overlap) op.stream = draft.stream(stream);
      op.label = label;
      op.strategy = kOffloadActivationsName;
      segment.steps.emplace_back(std::move(op));
    };
    for (const SlotId id : parked_slots(backward)) {
      const Slot& device = backward.slot(id);
      SlotId here, drive;
      if (kind != Kind::kRead) here = add(device);
      const SlotId host = add(host_slot(device));
      if (nvme && kind != Kind::kFetch) drive = add(nvme_slot(device));
      if (kind == Kind::kPark) copy(here, host, "d2h", device.name);
      if (kind == Kind::kPark && nvme) copy(host, drive, "nvme.write", device.name);
      if (kind == Kind::kRead) copy(drive, host, "nvme.read", device.name);
      if (kind == Kind::kFetch) copy(host, here, "h2d", device.name);
    }
    return segment;
  });
}

void offload_activations(Draft& draft) {
  for (StageDraft& stage : draft.stages) Parking(draft, stage).run();
}

}  // namespace shardlab::strategies
