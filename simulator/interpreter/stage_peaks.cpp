#include "simulator/interpreter/stage_peaks.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "plan/base/check.h"
#include "simulator/interpreter/recompute_budget.h"

namespace shardlab::simulator {
namespace {

/// A piece of a role's program that belongs to one layer or to none, at a place that all treatments share: after how many calls
/// that compute, and the how-manieth piece of its owner there.
struct Place {
  int32_t calls = 0;
  int32_t layer = -1;  ///< of the model
  int32_t piece = 0;
  friend auto operator<=>(const Place&, const Place&) = default;
};
struct Piece {
  Place at;
  bool parks = false;  ///< moves a layer's tensors; else it computes, or is nobody's
  Rise rise;
};

bool parks(const Segment& segment) {
  const Op* op = segment.steps.empty() ? nullptr : std::get_if<Op>(&segment.steps.front());
  return op != nullptr && op->strategy == "offload-activations";
}

Rise rise_of(Space space, int64_t bytes) {
  Rise r;
  if (static_cast<size_t>(space) >= kTreatedSpaces) return r;
  r.net[static_cast<size_t>(space)] = bytes;
  r.highest[static_cast<size_t>(space)] = std::max<int64_t>(bytes, 0);
  return r;
}

Rise rise_of(const Segment& segment) {
  Rise all;
  for (const Step& step : segment.steps) {
    const auto* a = std::get_if<AllocSlot>(&step);
    const auto* f = std::get_if<FreeSlot>(&step);
    if (a == nullptr && f == nullptr) continue;
    const Slot& slot = segment.slots[(a != nullptr ? a->slot : f->slot).index()];
    all.then(rise_of(slot.space, (a != nullptr ? 1 : -1) * aligned(slot.type.bytes())));
  }
  return all;
}

/// Which layer's parking each item of a program belongs to, -1 for none: an allocation that of the next copy which binds the buffer
/// before anything else does, a release that of the last.
std::vector<int32_t> parking_layers(const Plan& plan, const Role& role) {
  std::vector<int32_t> owner(role.program.size(), -1), of_buffer(role.buffers.size(), -1);
  const auto visit = [&](size_t i, bool backward) {
    const Item& item = role.program[i];
    if (const Call* call = std::get_if<Call>(&item)) {
      const int32_t layer = parks(plan.segments[call->segment.index()]) ? call->layer : -1;
      owner[i] = layer;
      for (const BufferId id : call->binding)
        if (id) of_buffer[id.index()] = layer;
    } else if (const Alloc* a = std::get_if<Alloc>(&item); a != nullptr && backward) {
      owner[i] = std::exchange(of_buffer[a->buffer.index()], -1);
    } else if (const Free* f = std::get_if<Free>(&item); f != nullptr && !backward) {
      owner[i] = std::exchange(of_buffer[f->buffer.index()], -1);
    }
  };
  for (size_t i = 0; i < role.program.size(); ++i) visit(i, false);
  std::ranges::fill(of_buffer, -1);
  for (size_t i = role.program.size(); i-- > 0;) visit(i, true);
  return owner;
}

std::vector<Piece> pieces_of(const Plan& plan, const Role& role, const std::vector<Rise>& rises) {
  const std::vector<int32_t> parking = parking_layers(plan, role);
  std::vector<Piece> pieces;
  std::map<std::pair<int32_t, int32_t>, int32_t> count;  // of pieces, by calls and layer
  int32_t calls = 0;
  const auto add = [&](int32_t layer, bool parked, const Rise& rise) {
    const bool same =
        !pieces.empty() && pieces.back().at.calls == calls && pieces.back().at.layer == layer && pieces.back().parks == parked;
    if (same && (parked || layer < 0)) return pieces.back().rise.then(rise);
    pieces.push_back({{calls, layer, count[{calls, layer}]++}, parked, rise});
  };
  for (size_t i = 0; i < role.program.size(); ++i) {
    const Item& item = role.program[i];
    if (const Call* call = std::get_if<Call>(&item)) {
      const Rise& rise = rises[call->segment.index()];
      if (parking[i] >= 0) {
        add(parking[i], true, rise);
      } else {
        ++calls;
        add(call->layer, false, rise);
      }
    } else {
      const Alloc* a = std::get_if<Alloc>(&item);
      const Buffer& b = role.buffers[(a != nullptr ? a->buffer : std::get<Free>(item).buffer).index()];
      add(parking[i], parking[i] >= 0, rise_of(b.space, (a != nullptr ? 1 : -1) * aligned(b.type.bytes())));
    }
  }
  return pieces;
}

/// The calls of a layer's own segments, in order, that compute one of its micro-batches.
template <class Use>
void for_each_layer_call(const Plan& plan, const Role& role, int32_t layer, const Use& use) {
  for (const Item& item : role.program)
    if (const Call* call = std::get_if<Call>(&item); call != nullptr && call->layer == layer && call->micro_batch >= 0)
      if (plan.segments[call->segment.index()].name.starts_with("layer")) use(*call);
}

/// Most micro-batches between a layer's forward and the first call of its backward.
int64_t most_in_flight(const Plan& plan, const Role& role, int32_t layer) {
  std::map<int, int> calls;  // by micro-batch
  int64_t live = 0, most = 0;
  for_each_layer_call(plan, role, layer, [&](const Call& call) {
    const int before = calls[call.micro_batch]++;
    live += before == 0 ? 1 : before == 1 ? -1 : 0;
    most = std::max(most, live);
  });
  return most;
}

std::vector<int32_t> layers_of(const Role& role) {
  std::set<int32_t> layers;
  for (const Item& item : role.program)
    if (const Call* call = std::get_if<Call>(&item); call != nullptr && call->layer >= 0) layers.insert(call->layer);
  return {layers.begin(), layers.end()};
}

std::vector<Rise> rises_of(const Plan& plan) {
  std::vector<Rise> rises;
  for (const Segment& segment : plan.segments) rises.push_back(rise_of(segment));
  return rises;
}

}  // namespace

void Rise::then(const Rise& next) {
  for (size_t s = 0; s < kTreatedSpaces; ++s) {
    highest[s] = std::max(highest[s], net[s] + next.highest[s]);
    net[s] += next.net[s];
  }
}

Result<StagePeaks> StagePeaks::of(const Case& config, std::vector<LayerTreatment> treatments, const Lower& lower) {
  const auto all_under = [&](const Case& c, const LayerTreatment& t) {
    return decided(c, std::vector<LayerTreatment>(static_cast<size_t>(c.model.layers), t));
  };
  const auto first = CasePlan::of(all_under(config, treatments.front()), lower);
  if (!first.ok()) return first.error();
  Case few = config;
  few.train.grad_accumulation = first->plan().micro_batches, few.train.global_batch_tokens = 0;
  std::vector<Plan> plans;
  std::vector<std::vector<Rise>> rises;
  for (const LayerTreatment& t : treatments) {
    auto plan = lower(all_under(few, t));
    if (!plan.ok()) return plan.error();
    plans.push_back(std::move(*plan));
    rises.push_back(rises_of(plans.back()));
  }
  StagePeaks out;
  for (size_t t = 0; t < plans.size(); ++t) {
    std::vector<Rise> calls;                 // of one micro-batch: forward, then backward in one piece or two
    for (const Role& role : plans[t].roles)  // the one that has layer 0
      for_each_layer_call(plans[t], role, 0, [&](const Call& call) {
        if (call.micro_batch == 0) calls.push_back(rises[t][call.segment.index()]);
      });
    Rise all;
    for (const Rise& call : calls) all.then(call);
    out.kept_.push_back(treatments[t].parked ? 0 : calls.front().net[0]);
    out.forward_.push_back(calls.front().highest[0]);
    out.backward_.push_back(all.highest[0]);
  }
  // The plan of a parked treatment has the pieces of all.
  const auto parked = std::ranges::find(treatments, true, &LayerTreatment::parked);
  const size_t widest = static_cast<size_t>(parked - treatments.begin()) % plans.size();
  for (size_t s = 0; s < plans.front().roles.size(); ++s) {
    std::vector<std::vector<Piece>> pieces;
    std::vector<std::map<Place, Rise>> by_place(plans.size());
    for (size_t t = 0; t < plans.size(); ++t) {
      pieces.push_back(pieces_of(plans[t], plans[t].roles[s], rises[t]));
      for (const Piece& p : pieces.back()) by_place[t][p.at] = p.rise;
    }
    const Role& role = plans.front().roles[s];
    Stage stage{.layers = layers_of(role)};
    if (!stage.layers.empty()) stage.in_flight = most_in_flight(plans.front(), role, stage.layers.front());
    const auto short_peaks = memory_peak(first->plan(), static_cast<int>(s));
    for (size_t space = 0; space < kTreatedSpaces; ++space) {
      stage.persistent[space] = short_peaks[space].persistent_bytes;
      stage.longer[space] = first->stages()[s][space].peak_bytes - short_peaks[space].peak_bytes;
    }
    stage.whole_step = stage.persistent[0];
    for (const Piece& p : pieces[widest]) {
      if (p.at.calls == 0) stage.whole_step += p.rise.net[0];
      if (p.at.layer < 0) {
        if (stage.parts.empty() || stage.parts.back().layer >= 0) stage.parts.emplace_back();
        stage.parts.back().rise.then(p.rise);
        continue;
      }
      const auto layer = std::ranges::lower_bound(stage.layers, p.at.layer) - stage.layers.begin();
      stage.parts.push_back({static_cast<int32_t>(layer), static_cast<int32_t>(stage.by_treatment.size()), {}});
      for (size_t t = 0; t < plans.size(); ++t) {
        const auto found = by_place[t].find(p.at);
        stage.by_treatment.push_back(found == by_place[t].end() ? Rise{} : found->second);
      }
    }
    out.stages_.push_back(std::move(stage));
  }
  out.few_ = std::move(few), out.lower_ = lower, out.treatments_ = std::move(treatments);
  return out;
}

StagePeaks::Peak StagePeaks::lowered(int64_t stage, std::span<const size_t> assigned) const {
  const Stage& s = stages_[static_cast<size_t>(stage)];
  std::vector<LayerTreatment> layers(static_cast<size_t>(few_.model.layers));
  for (size_t i = 0; i < assigned.size(); ++i) layers[static_cast<size_t>(s.layers[i])] = treatments_[assigned[i]];
  const auto plan = lower_(decided(few_, layers));
  SHARDLAB_CHECK(plan.ok(), "{}", to_string(plan.error()));
  const auto peaks = memory_peak(*plan, static_cast<int>(stage));
  return {peaks[0].peak_bytes + s.longer[0], peaks[1].peak_bytes + s.longer[1]};
}

StagePeaks::Peak StagePeaks::peak(int64_t stage, std::span<const size_t> assigned) const {
  if (few_.layout.zero == 3 && std::ranges::any_of(assigned, [&](size_t t) { return treatments_[t].parked; }))
    return lowered(stage, assigned);
  const Stage& s = stages_[static_cast<size_t>(stage)];
  Rise all{.highest = s.persistent, .net = s.persistent};
  for (const Part& part : s.parts)
    all.then(part.layer < 0 ? part.rise
                            : s.by_treatment[static_cast<size_t>(part.first) + assigned[static_cast<size_t>(part.layer)]]);
  return {all.highest[0] + s.longer[0], all.highest[1] + s.longer[1]};
}

}  // namespace shardlab::simulator
