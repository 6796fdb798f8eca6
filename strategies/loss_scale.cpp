// fp16 with a loss scale: the gradient of the loss is multiplied by a scale before it is rounded to 16 bits, so that small
// gradients keep their bits, and divided by it in the update. The scale is fixed, or dynamic: halved after a step whose gradients
// overflowed, doubled after `loss_scale_interval` steps in a row that did not.
//
// `scale_loss` has the loss read the scale, and says in the type of every gradient that it is per `loss_scale`: an update that does
// not divide it out is a type error. `loss_scaling` looks, in the gradients as they will be updated with (reduced, sliced or tied),
// for infinities and NaNs; the flag is the greatest over all ranks that hold other slices or stages, so that every rank skips or
// none does. That comes before anything is divided or clipped. A step that is skipped updates no parameter and no moment and is not
// counted: bias correction and the learning rate's schedule go by the updates made. Its data are not seen again.
// The factor 1 / scale is what updates multiply gradients by, together with the factor of clipping: no gradient is written again.
// With powers of two, as every dynamic scale is that began as one, scaling is exact but where fp16 over- or underflows.
//
// Shapes   scale, factor and flags [1]
// Adds     one i32 all-reduced (maximum) over tp, over dp under ZeRO, over pp: all ranks wait for all before the first update
// Memory   a few bytes
// Refuses  other precisions than fp16 (`check`)
// Paper    Micikevicius et al., "Mixed Precision Training" (2018), section 3.2
#include "strategies/loss_scale.h"

#include "plan/named_kernels.h"
#include "plan/run_state.h"
#include "strategies/draft.h"
#include "strategies/skipped_update.h"

namespace shardlab::strategies {
namespace {

constexpr std::string_view kLossScaleName = "loss-scale";

/// Before recompute all that backward makes for itself are gradients, apart from what it gathers anew of forward's values.
bool is_gradient(const DraftSegment& backward, size_t slot) {
  if (!std::string_view(backward.segment.slots[slot].name).starts_with("d.")) return false;
  const auto& view = backward.segment.slots[slot].view;
  const Use use = backward.uses[view ? static_cast<size_t>(view->base) : slot].use;
  return use == Use::kGradient || use == Use::kGradientIn || use == Use::kGradientOut || use == Use::kLocal;
}

void scale_type(Slot& slot) { slot.type.scale.denominator = kLossScale; }

/// The loss writes its gradient over the logits; from then on they go by another name with the gradient's type.
SlotId rename_logits(DraftSegment& segment, SlotId logits) {
  const SlotId gradient = segment.add_view("d.logits", logits, segment.slot(logits).type);
  scale_type(segment.slot(gradient));
  return gradient;
}

void scale_head(DraftSegment& forward, DraftSegment& backward) {
  Type number;
  number.shape = {1};
  const SlotId scale = forward.add(std::string(kLossScaleBuffer), number, Use::kNamed, BufferClass::kOther);
  const SlotId logits = forward.find("logits"), gradient = rename_logits(forward, logits);
  for (Step& step : forward.segment.steps) {
    Op& op = std::get<Op>(step);
    const auto* loss = std::get_if<CrossEntropy>(&op.work);
    if (loss == nullptr || (loss->part != CrossEntropy::Part::kFused && loss->part != CrossEntropy::Part::kGrad)) continue;
    op.reads.push_back(scale);
    op.writes.back() = gradient;
  }
  const SlotId read = backward.find("logits"), renamed = rename_logits(backward, read);
  for (Step& step : backward.segment.steps)
    for (SlotId& slot : std::get<Op>(step).reads)
      if (slot == read) slot = renamed;
}

/// Where the scale is before the first micro-batch.
BufferId set_scale(const Train& train, StageDraft& stage, const StageNumbers& numbers) {
  const bool dynamic = train.loss_scale == 0;
  const BufferId scale = numbers.number(std::string(kLossScaleBuffer), DType::f32, dynamic);
  std::vector<Event> first;
  if (dynamic) {
    const BufferId start = numbers.number("loss_scale.start");
    first.push_back(numbers.call("loss_scale.begin", {start}, Fill{train.loss_scale_start}, {}, {0}));
    first.push_back(numbers.call("loss_scale.start", {scale, start}, named("start_scale"), {0, 1}, {0}));
  } else {
    first.push_back(numbers.call("loss_scale.begin", {scale}, Fill{train.loss_scale}, {}, {0}));
  }
  stage.events.insert(stage.events.begin(), std::make_move_iterator(first.begin()), std::make_move_iterator(first.end()));
  return scale;
}

}  // namespace

void scale_loss(Draft& draft) {
  for (UnitTemplate& unit : draft.templates)
    for (size_t s = 0; s < unit.backward.segment.slots.size(); ++s)
      if (is_gradient(unit.backward, s)) scale_type(unit.backward.segment.slots[s]);
  UnitTemplate& head = draft.of(UnitKind::kHead);
  scale_head(head.forward, head.backward);
}

void loss_scaling(Draft& draft) {
  const Train& train = draft.config.train;
  for (StageDraft& stage : draft.stages) {
    const StageNumbers numbers(draft, stage, kLossScaleName);
    const BufferId scale = set_scale(train, stage, numbers);
    stage.named[std::string(kLossScaleBuffer)] = scale;
    const BufferId bad = numbers.found_inf();
    stage.flags.push_back(bad);
    stage.gradient_factor = stage.unscale = numbers.number("unscale");
    stage.role.buffers[stage.gradient_factor.index()].type.scale.denominator = kLossScale;
    numbers.append("unscale", {scale, stage.gradient_factor}, named("unscale_factor"), {0}, {1});
    if (train.loss_scale > 0) continue;
    const BufferId good = numbers.number("loss_scale.good", DType::i32, true), interval = numbers.number("loss_scale.interval");
    numbers.append("loss_scale.interval", {interval}, Fill{static_cast<float>(train.loss_scale_interval)}, {}, {0});
    numbers.append("loss_scale.adjust", {bad, scale, good, interval}, named("adjust_scale"), {0, 1, 2, 3}, {1, 2});
  }
}

}  // namespace shardlab::strategies
