#include "strategies/expert_loads.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace shardlab::strategies {
namespace {

constexpr std::string_view kLoad = "moe.load";

void sum_loads_of(Draft& draft, UnitTemplate& layer, AxisSet axes, std::string_view strategy) {
  for (DraftSegment* segment : {&layer.forward, &layer.backward}) {
    cut_router(*segment, draft.config.train.seq_len);
    if (segment == &layer.forward) continue;
    auto& steps = segment->segment.steps;
    const auto at = steps.begin() + static_cast<std::ptrdiff_t>(router_of(*segment));
    Op& router = std::get<Op>(*at);
    Type type = segment->slot(segment->find("moe.logits")).type;  // which says how sequences are dealt
    type.shape = {type.shape[0], type.shape[2]};
    const SlotId load =
        segment->add(std::string(kLoad), placed(type, axes, Placement::replicate()), Use::kLocal, BufferClass::kTemporary);
    const SlotId part = segment->add_view(std::string(kLoad) + ".part", load, placed(type, axes, Placement::partial()));
    router.reads.push_back(load);
    const CommId comm = draft.comm(draft.config.layout.cp > 1 ? "cp.load" : "tp.load", axes);
    const Collective sum{CollectiveKind::kAllReduce, ReduceOp::kSum, comm, draft.algorithm()};
    steps.insert(at, {make_op(ExpertLoad{}, {segment->find("moe.choice")}, {part}, std::string(kLoad), strategy),
                      make_op(sum, {part}, {load}, "moe.load.all", strategy)});
  }
}

void share_room_of(Draft& draft, UnitTemplate& layer, AxisSet axes, std::string_view strategy) {
  const Case& config = draft.config;
  for (DraftSegment* segment : {&layer.forward, &layer.backward}) {
    cut_router(*segment, config.train.seq_len);
    std::get<Route>(std::get<Op>(segment->segment.steps[router_of(*segment)]).work).biased = false;  // it chooses nothing
  }
  DraftSegment& segment = layer.forward;
  auto& steps = segment.segment.steps;
  const size_t at = router_of(segment);
  Op& router = std::get<Op>(steps[at]);
  const Route& route = std::get<Route>(router.work);
  const Type part = segment.slot(segment.find("moe.choice")).type;
  Type whole = part;
  whole.shape[1] = config.train.seq_len;
  const SlotId chosen = segment.add("moe.chosen", part, Use::kLocal, BufferClass::kTemporary);
  const SlotId all =
      segment.add("moe.chosen.all", placed(whole, axes, Placement::replicate()), Use::kLocal, BufferClass::kTemporary);
  const ChooseExperts choose{.sigmoid = route.sigmoid,
                             .groups = route.groups,
                             .groups_chosen = route.groups_chosen,
                             .biased = config.model.experts.has_bias()};
  const CommId comm = draft.comm(config.layout.cp > 1 ? "cp.chosen" : "tp.chosen", axes);
  const Collective gather{CollectiveKind::kAllGather, ReduceOp::kSum, comm, draft.algorithm()};
  Op first = make_op(choose, std::exchange(router.reads, {segment.find("moe.logits"), all}), {chosen}, "moe.choose", strategy);
  Op second = make_op(gather, {chosen}, {all}, "moe.chosen.all", strategy);
  steps.insert(steps.begin() + static_cast<std::ptrdiff_t>(at), {Step(std::move(first)), Step(std::move(second))});
}

}  // namespace

size_t router_of(const DraftSegment& segment) {
  const auto& steps = segment.segment.steps;
  const auto at = std::ranges::find_if(steps, [](const Step& s) { return std::holds_alternative<Route>(std::get<Op>(s).work); });
  SHARDLAB_CHECK(at != steps.end(), "{} has no router", segment.segment.name);
  return static_cast<size_t>(at - steps.begin());
}

void cut_router(DraftSegment& segment, int64_t tokens) {
  std::get<Route>(std::get<Op>(segment.segment.steps[router_of(segment)]).work).sequence = tokens;
}

void share_room(Draft& draft, AxisSet axes, std::string_view strategy) {
  if (!draft.config.model.experts.drops()) return;
  for (const UnitKind kind : draft.mixture_kinds()) share_room_of(draft, draft.of(kind), axes, strategy);
}

void sum_loads(Draft& draft, AxisSet axes, std::string_view strategy) {
  if (draft.config.model.experts.balance == 0) return;
  for (const UnitKind kind : draft.mixture_kinds()) sum_loads_of(draft, draft.of(kind), axes, strategy);
}

}  // namespace shardlab::strategies
