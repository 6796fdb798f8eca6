// Experts that groups of tensor-parallel ranks share (expert_tp below tp): attention, the feed-forwards of dense layers and shared experts are cut
// by the t ranks of a `tp` group, and experts by x of them, or by none (expert_tp 1: whole). The t/x groups share the experts instead, as ranks with
// other sequences do. So experts have a mesh of their own, whose expert-parallel groups lie along tp first, then cp, then dp ("parallel folding").
//
// With x above 1 the mesh has two axes in place of one: `tp` counts groups, and `etp` the ranks of one. All else is cut along both. Along etp an
// expert is cut as tensor parallelism cuts it (tensor_parallel.cpp), and tokens are gathered and scattered as sequence parallelism does
// (sequence_parallel.cpp); along tp the following holds, of groups in place of ranks.
//
// To a router the ranks of tp are what ranks of context parallelism are: each has a part of every sequence, which sequence parallelism leaves it,
// and routes the tokens of that part. Nothing is gathered before the router, and nothing is scattered behind the experts. An expert is computed
// as one product of full width, in place of t products of width f/t.
//
// A router is the same on every rank of tp, and its gradient a sum over the tokens of all of them: each micro-batch's is added up over the ranks, as
// those of norms are, and leaves backward whole. An expert has seen the rows of its whole group: its gradient is summed over the ranks of dp
// that have the same expert, and over no rank of tp. Loads of experts, for the loss for even use and for biases, are summed over tp too, and
// what the tokens of all ranks choose is gathered where experts have a capacity.
//
// Shared experts take every token, whatever its route: they stay cut as a feed-forward, with sequence parallelism's gather and scatter.
//
// Shapes   logits[b,s/t,e] weights, choice[b,s/t,k]; rows of experts [1, b s/t k, width]; moe.wup[e,2f,h], moe.wdown[e,h,f] until `ep` shares
//          them
// Adds     per layer and micro-batch an all-reduce of e h (the router's gradient) and, with a loss for even use, of b e, and with a
//          capacity a gather of b s top_k, forward; without shared experts 3 all-gathers and 2 reduce-scatters of b s h fewer. Each rank exchanges the rows of b s/t tokens in place of b s
// Memory   logits, choices and rows of a rank's tokens 1/t
// Refuses  a rank with all tokens (sequence_parallel false); ranks of tp that do not share the experts (ep); canonical with several sequences
//          a micro-batch, as cp does (`check`)
// Paper    Liu et al., "MoE Parallel Folding" (2025), arXiv 2504.14960
#include "strategies/whole_experts.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

#include "strategies/expert_loads.h"
#include "strategies/router_bias.h"

namespace shardlab::strategies {
namespace {

constexpr std::string_view kWholeExpertsName = "whole-experts";

class WholeExperts {
 public:
  WholeExperts(Draft& draft, UnitTemplate& layer)
      : draft_(draft), layer_(layer), axis_(draft.plan.mesh.axis("tp")), size_(draft.config.layout.expert_groups()) {}

  void run() {
    for (DraftSegment* segment : {&layer_.forward, &layer_.backward})
      for (Slot& slot : segment->segment.slots) cut(slot);
    sum_router_gradient(layer_.backward);
    if (const auto load = layer_.backward.find_if(kRouterLoadSlot)) {
      Slot& slot = layer_.backward.slot(*load);
      slot.type = placed(slot.type, axis_, Placement::partial());
    }
  }

 private:
  /// What a router says of tokens, and rows, are of the rank's own tokens. In fast mode rows are counted in one part, whatever the tokens.
  void cut(Slot& slot) const {
    std::string_view name = slot.name;
    if (name.starts_with("d.")) name.remove_prefix(2);
    // What the ranks of a group make of its tokens' rows is a partial sum, before they scatter it.
    const bool summed = name == "mlp.z.part" || name == "mlp.norm.y.part" || name == "moe.weights.part";
    const bool routed = name == "moe.logits" || name == "moe.weights" || name == "moe.choice" || summed;
    if (!routed && !is_rows_of_experts(slot)) return;
    if (name != "rows.counts" || draft_.config.canonical) slot.type.shape[1] /= size_;
    slot.type = placed(slot.type, axis_, Placement::shard(1));
  }

  /// Each rank sums over its tokens, and the ranks add up these sums, before micro-batches are added up.
  void sum_router_gradient(DraftSegment& backward) const {
    auto& steps = backward.segment.steps;
    const auto at = std::ranges::find_if(steps, [](const Step& s) {
      const Op& op = std::get<Op>(s);
      return op.label == "moe.router" && phase_of(op.work) == Phase::kW;
    });
    SHARDLAB_CHECK(at != steps.end(), "{} has no gradient of a router", backward.segment.name);
    SlotId& write = std::get<Op>(*at).writes[0];
    const SlotId gradient = write;
    const Type type = backward.slot(gradient).type;
    const SlotId sum = backward.add("d.moe.router.sum", type, Use::kLocal, BufferClass::kTemporary);
    const SlotId part = backward.add_view("d.moe.router.part", sum, placed(type, axis_, Placement::partial()));
    write = part;
    const Collective all{CollectiveKind::kAllReduce, ReduceOp::kSum, comm_of_groups(), draft_.algorithm()};
    steps.insert(at + 1, {make_op(all, {part}, {sum}, "moe.router.all", kWholeExpertsName),
                          make_op(Copy{}, {sum}, {gradient}, "moe.router.sum", kWholeExpertsName)});
  }

  /// Of the ranks of tp that have other tokens.
  CommId comm_of_groups() const { return draft_.comm(draft_.plan.mesh.find(kSlicesAxis) ? "tp.groups" : "tp", AxisSet::of(axis_)); }

  Draft& draft_;
  UnitTemplate& layer_;
  int axis_;
  int size_;
};

}  // namespace

void whole_experts(Draft& draft) {
  for (const UnitKind kind : draft.mixture_kinds()) WholeExperts(draft, draft.of(kind)).run();
  if (draft.config.layout.cp > 1) return;  // context parallelism says how all parts of a sequence are routed
  share_room(draft, routed_axes(draft), kWholeExpertsName);
  sum_loads(draft, routed_axes(draft), kWholeExpertsName);
}

}  // namespace shardlab::strategies
