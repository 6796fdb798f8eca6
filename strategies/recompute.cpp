// Recompute (activation checkpointing): what forward made is given up and made again in backward, from what is still there.
//
// Full: a layer saves nothing but its input, and backward runs the layer's forward again for what it needs, all of it first. Ops
// of forward whose results backward does not need (the last projection and residual) are not repeated. `recompute_options.every: k`
// does so for every k-th layer of the model only, the first included, whichever stage has it; the others keep what they made.
// Selective: a layer gives up the results of named sub-layers without a matrix product, and backward makes each again right before
// the first op that reads it, so that no two sub-layers' results stand beside each other longer than they must.
// By layer: each layer of the model goes by a treatment of its own, which `recompute` lists: none, full, or a set of sub-layers.
// Layers of one treatment share a variant of the layer's segments.
//
// Shapes   as without
// Adds     full: per layer (of every k) one forward less its last matmul; under tensor parallelism the all-reduces of the
//          repeated ops
//          selective: the ops of the sub-layers; no collective
// Memory   full: per layer and micro-batch in flight b*s*h (the input); one layer's activations while its backward runs
//          selective: what the sub-layers made is no longer kept: attn.core b*s*(h + a)/t, mlp.act b*s*f/t, a norm b*s*(h + 1 or 2)
// Refuses  sub-layers that are none of those four (`check`)
// Paper    Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016); Korthikanti et al., "Reducing Activation
//          Recomputation in Large Transformer Models" (2022), section 5
#include "strategies/recompute.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <string>

#include "plan/named_kernels.h"
#include "plan/treatment.h"
#include "strategies/draft.h"

namespace shardlab::strategies {
namespace {

/// The slots of one segment, by root.
using Slots = std::set<int32_t>;

int32_t root_of(const DraftSegment& segment, SlotId slot) {
  const auto& view = segment.slot(slot).view;
  return view ? view->base : slot.value;
}

bool writes_any(const DraftSegment& segment, const Op& op, const Slots& slots) {
  return std::ranges::any_of(op.writes, [&](SlotId w) { return slots.contains(root_of(segment, w)); });
}

/// Whether `op` makes some slot of `needed`: writes it, or sends around a ring what another of `ops` then receives there. The halves of
/// a hop go together.
bool makes_any(const DraftSegment& segment, const Op& op, const std::vector<Op>& ops, const Slots& needed) {
  constexpr std::string_view kSend = "send.", kReceive = "receive.";
  if (!std::holds_alternative<Send>(op.work)) return writes_any(segment, op, needed);
  const std::string_view message = std::string_view(op.label).substr(kSend.size());
  return std::ranges::any_of(ops, [&](const Op& other) {
    return std::holds_alternative<Recv>(other.work) && std::string_view(other.label).substr(kReceive.size()) == message &&
           writes_any(segment, other, needed);
  });
}

/// The forward ops that make some slot of `needed`, in order. `needed` grows by the slots that these ops read, except
/// those in `kept`.
std::vector<Op> ops_that_make(const DraftSegment& forward, Slots needed, const Slots& kept) {
  std::vector<Op> ops, all;
  for (const Step& step : forward.segment.steps) all.push_back(std::get<Op>(step));
  for (auto step = forward.segment.steps.rbegin(); step != forward.segment.steps.rend(); ++step) {
    const Op& op = std::get<Op>(*step);
    if (!makes_any(forward, op, all, needed)) continue;
    for (const SlotId r : op.reads)
      if (!kept.contains(root_of(forward, r))) needed.insert(root_of(forward, r));
    ops.push_back(op);
  }
  std::ranges::reverse(ops);
  return ops;
}

/// Slots of forward that backward finds saved.
Slots saved_slots(const UnitTemplate& unit) {
  Slots saved;
  for (size_t s = 0; s < unit.backward.uses.size(); ++s)
    if (unit.backward.uses[s].use == Use::kSaved) saved.insert(unit.forward.find(unit.backward.segment.slots[s].name).value);
  return saved;
}

/// Whether a slot holds a scale for rounding to 8 bits. Scales are kept: a tensor made again is rounded as before, and ranks need
/// not agree again.
bool is_scale(const Slot& slot) { return slot.type.shape.elements() == 1 && std::string_view(slot.name).ends_with(".scale"); }

Slots scales_of(const DraftSegment& forward, const Slots& slots) {
  Slots scales;
  for (const int32_t slot : slots)
    if (is_scale(forward.slot(SlotId(slot)))) scales.insert(slot);
  return scales;
}

/// Adds the 8-bit copies of a sub-layer's results to `made`: they go with these results.
void add_rounded(const DraftSegment& forward, Slots& made) {
  for (const Step& step : forward.segment.steps) {
    const Op& op = std::get<Op>(step);
    const auto* kernel = std::get_if<Kernel>(&op.work);
    if (kernel == nullptr || meaning_of(*kernel) != KernelMeaning::kRounding) continue;
    if (!made.contains(root_of(forward, op.reads[0]))) continue;
    for (const SlotId w : op.writes) made.insert(root_of(forward, w));
  }
}

/// Makes slots of forward local to both segments: what was saved is made anew in backward and lives only there.
void give_up(DraftSegment& forward, DraftSegment& backward, const Slots& slots) {
  for (const int32_t slot : slots)
    for (DraftSegment* segment : {&forward, &backward}) {
      const auto id = segment->find_if(forward.slot(SlotId(slot)).name);
      if (!id) continue;
      segment->uses[id->index()].use = Use::kLocal;
      segment->slot(*id).kind = SlotKind::kLocal;
      segment->slot(*id).cls = BufferClass::kTemporary;
    }
}

/// Ops of forward in the slots of backward, where what only forward had gets a slot.
void move_to_backward(const DraftSegment& forward, DraftSegment& backward, std::vector<Op>& ops, std::string_view strategy) {
  const auto in_backward = [&](SlotId slot) {
    const Slot& f = forward.slot(slot);
    if (const auto found = backward.find_if(f.name)) return *found;
    if (f.view) {
      const SlotId view = backward.add_view(f.name, backward.find(forward.slot(SlotId(f.view->base)).name), f.type);
      backward.slot(view).view->shard_axes = f.view->shard_axes;
      return view;
    }
    const SlotUse use = forward.uses[slot.index()];
    return backward.add(f.name, f.type, use.use, f.cls, use.parameter);
  };
  // Bases before their views, so that each view finds its base.
  for (Op& op : ops)
    for (const auto* operands : {&op.reads, &op.writes})
      for (const SlotId slot : *operands)
        if (const auto& view = forward.slot(slot).view) in_backward(SlotId(view->base));
  for (Op& op : ops) {
    for (auto* operands : {&op.reads, &op.writes})
      for (SlotId& slot : *operands) slot = in_backward(slot);
    op.strategy = strategy;
    op.label += ".again";
  }
}

/// Puts each op of `again` before the first op of backward that needs it.
void insert_before_use(DraftSegment& backward, std::vector<Op> again) {
  std::vector<Step> steps;
  for (Step& step : backward.segment.steps) {
    Slots needed;
    for (const SlotId r : std::get<Op>(step).reads) needed.insert(root_of(backward, r));
    std::vector<Op> due;
    for (auto op = again.rbegin(); op != again.rend(); ++op) {
      if (!makes_any(backward, *op, again, needed)) continue;
      for (const SlotId r : op->reads) needed.insert(root_of(backward, r));
      due.push_back(*op);
    }
    std::erase_if(again, [&](const Op& op) { return std::ranges::find(due, op.label, &Op::label) != due.end(); });
    steps.insert(steps.end(), due.rbegin(), due.rend());
    steps.push_back(std::move(step));
  }
  SHARDLAB_CHECK(again.empty(), "backward does not need {}", again.front().label);
  backward.segment.steps = std::move(steps);
}

/// Whether a list of words separated by spaces has this one.
bool has_word(std::string_view list, std::string_view word) {
  const std::string padded = " " + std::string(list) + " ";
  return padded.find(" " + std::string(word) + " ") != std::string::npos;
}

/// What backward makes again by itself (a weight in 8 bits, gathered keys) is made once.
void leave_out(DraftSegment& backward, const std::vector<Op>& again) {
  std::erase_if(backward.segment.steps,
                [&](const Step& s) { return std::ranges::find(again, std::get<Op>(s).label, &Op::label) != again.end(); });
}

void make_all_again(UnitTemplate& layer) {
  Slots saved = saved_slots(layer);
  const Slots scales = scales_of(layer.forward, saved);
  for (const int32_t scale : scales) saved.erase(scale);
  std::vector<Op> again = ops_that_make(layer.forward, saved, scales);
  give_up(layer.forward, layer.backward, saved);
  move_to_backward(layer.forward, layer.backward, again, "full-recompute");
  leave_out(layer.backward, again);
  auto& steps = layer.backward.segment.steps;
  steps.insert(steps.begin(), std::make_move_iterator(again.begin()), std::make_move_iterator(again.end()));
}

void make_some_again(UnitTemplate& layer, std::string_view modules) {
  Slots made, given_up, kept = saved_slots(layer);
  for (const Step& step : layer.forward.segment.steps) {
    const Op& op = std::get<Op>(step);
    if (!has_word(modules, op.label)) continue;
    for (const SlotId w : op.writes) made.insert(root_of(layer.forward, w));
  }
  add_rounded(layer.forward, made);
  std::ranges::set_intersection(made, kept, std::inserter(given_up, given_up.end()));
  for (const int32_t slot : given_up) kept.erase(slot);
  std::vector<Op> again = ops_that_make(layer.forward, given_up, kept);
  give_up(layer.forward, layer.backward, given_up);
  move_to_backward(layer.forward, layer.backward, again, "selective-recompute");
  leave_out(layer.backward, again);
  insert_before_use(layer.backward, std::move(again));
}

void treat(UnitTemplate& layer, const LayerTreatment& treatment) {
  if (treatment.full)
    make_all_again(layer);
  else if (treatment.again != 0)
    make_some_again(layer, modules_of(treatment.again));
}

/// The name of a treatment's segments. Whether the layer is parked makes no difference to them.
std::string form_of(LayerTreatment treatment) {
  treatment.parked = false;
  return name_of(treatment);
}

/// Puts `word` into the names of a layer's segments: "layer.again.F".
void rename(UnitTemplate& layer, std::string_view word) {
  for (DraftSegment* segment : {&layer.forward, &layer.backward}) {
    std::string& name = segment->segment.name;
    name.insert(name.rfind('.'), fmt::format(".{}", word));
  }
}

/// The template of the layers of a kind that are made again: all of them, or every k-th layer, which then goes by a variant of it.
UnitTemplate& layers_made_again(Draft& draft, UnitKind kind) {
  const int every = draft.config.layout.recompute_options.every;
  if (every == 1) return draft.of(kind);
  const size_t variant = draft.templates.size();
  draft.templates.push_back(UnitTemplate(draft.of(kind)));
  rename(draft.templates.back(), "again");
  for (Unit& unit : draft.units)
    if (unit.kind == kind && unit.layer % every == 0) unit.form = variant;
  return draft.templates.back();
}

}  // namespace

void full_recompute(Draft& draft) {
  for (const UnitKind kind : draft.layer_kinds()) make_all_again(layers_made_again(draft, kind));
}

void selective_recompute(Draft& draft) {
  const std::string& named = draft.config.layout.recompute_options.modules;
  for (const UnitKind kind : draft.layer_kinds())
    make_some_again(draft.of(kind), named.empty() ? kAttentionCore : std::string_view(named));
}

void recompute_by_layer(Draft& draft) {
  const std::vector<LayerTreatment> treatments = treatments_of(draft.config);
  for (const UnitKind kind : draft.layer_kinds()) {
    const UnitTemplate plain = draft.of(kind);
    std::map<std::string, size_t> variants;  // by form
    for (Unit& unit : draft.units) {
      if (unit.kind != kind) continue;
      const LayerTreatment& treatment = treatments[static_cast<size_t>(unit.layer)];
      const auto [found, is_new] = variants.try_emplace(form_of(treatment), unit.form);
      if (is_new && variants.size() > 1) {
        found->second = draft.templates.size();
        rename(draft.templates.emplace_back(plain), std::to_string(variants.size()));
      }
      if (is_new) treat(draft.templates[found->second], treatment);
      unit.form = found->second;
    }
  }
}

}  // namespace shardlab::strategies
