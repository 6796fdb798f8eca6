// Expert parallelism: n neighbouring ranks, which have other tokens, share the experts: those with parts of the same sequences first (whole
// experts on ranks of tp, then context parallelism), and then ranks with other sequences. Each has 1/n of every layer's experts, and rows go to the ranks that have their experts and come back.
//
// A rank's tokens make rows for every group of experts, packed one after the other: [n groups, rows of a group, h], "at home" along these
// axes a shard of the rows. Moved by an all_to_all, all ranks' rows for one group are with its experts: [1, rows, h], a shard of the groups. How
// many rows go is known when the router has chosen; the counts travel first, and every rank has room for all rows of all ranks
// (dropless: nothing is dropped, padded or waited for). Where experts have a capacity, it has room for as many of each as that lets come; the
// exchange moves the rows that there are, and no padding.
//
// A weight of an expert sees the rows of all n ranks: its gradient is summed over the other data ranks alone, and divided by
// nothing. "Too large by n" would be a sum over ranks of what is a shard there, which has no type.
//
// With tensor parallelism each of the t ranks has a slice of every expert and the rows of all tokens, and exchanges them with the ranks
// that have the same slice. What the slices of an expert make of a row comes home as partial sums. With expert_tp 1 (whole_experts.cpp) the
// t ranks have tokens of their own, and belong to the n.
//
// Shapes   weights of experts [e/n, ..]; rows at home [n, ceil(b s/c k / n), h], with the experts [1, n n ceil(b s/c k / n), width], where c
//          counts the parts of a sequence that are routed by themselves
// Adds     per layer and micro-batch an all-to-all of counts, and of rows there and back, in forward and again in backward: 4 b s/c k h
//          elements, of which (n-1)/n leave the rank where routes are even
// Memory   weights, gradients and moments of experts 1/n; room for rows times n, or with a capacity C of each sequence n b min(s k', C e/n) rows with the
//          experts, k' the smaller of k and e/n
//          A placement of experts (plan/expert_placement.h) changes no op and no buffer: only which expert is at which place.
// Refuses  e not divisible by n; n that is no multiple of the parts of a sequence, or does not divide dp times these (`check`)
// Paper    Lepikhin et al., "GShard" (2020); Gale et al., "MegaBlocks" (2022), of which the dropless form
#include "strategies/expert_parallel.h"

#include <algorithm>
#include <array>
#include <string>
#include <string_view>

#include "plan/automatic.h"
#include "plan/mesh.h"
#include "plan/row_levels.h"

namespace shardlab::strategies {
namespace {

constexpr std::string_view kExpertParallelName = "expert-parallel";

class ExpertParallel {
 public:
  ExpertParallel(Draft& draft, UnitKind kind)
      : draft_(draft),
        kind_(kind),
        layer_(draft.of(kind)),
        axes_(expert_axes(draft) | routed_axes(draft)),
        size_(draft.config.layout.ep),
        comm_(draft.comm("ep", axes_)) {
    const Case& c = draft.config;
    const Experts& e = c.model.experts;
    const int64_t sequences = c.train.micro_batch, tokens = c.train.seq_len, parts = c.layout.routed_parts();
    rows_ = even_rows_of_experts(c);
    rows_of_group_ = (sequences * e.most_rows(tokens, e.count, parts) + size_ - 1) / size_;
    if (!e.drops()) return;
    room_ = sequences * e.most_rows(tokens, e.count / size_, parts);
    // Ranks that have parts of a sequence share its room.
    rows_of_all_ = size_ / parts * sequences * e.most_rows(tokens, e.count / size_);
  }

  void run() {
    share_experts();
    for (DraftSegment* segment : {&layer_.forward, &layer_.backward}) place_rows(*segment);
    DraftSegment &fwd = layer_.forward, &bwd = layer_.backward;
    for (DraftSegment* segment : {&fwd, &bwd}) away(*segment, "rows.counts", Use::kSaved);
    // Backward wants the rows that have come to the experts, so these are kept, and those that were sent are not.
    away(fwd, "rows.in", Use::kSaved);
    make_local(fwd, "rows.in");
    Slot& kept = bwd.slot(bwd.find("rows.in"));
    kept.type = with_experts(kept.type);
    kept.name = there("rows.in");
    away(bwd, "d.rows.out", Use::kLocal);
    read_away(fwd, "moe.up", "rows.in"), read_away(bwd, "moe.down", "d.rows.out");
    for (DraftSegment* segment : {&fwd, &bwd}) count_rows(*segment);

    insert(fwd, "moe.route", exchange(fwd, "rows.counts", "moe.counts"), true);
    insert(fwd, "moe.up", go(fwd, "rows.in", "moe.go"), false);
    come_back(fwd, "moe.down", "moe.return");
    insert(bwd, "moe.down", go(bwd, "d.rows.out", "moe.return.d"), false);
    come_back(bwd, "moe.up", "moe.go.d");
  }

 private:
  static std::string there(std::string_view name) { return std::string(name) + ".there"; }
  static bool is_expert_weight(std::string_view name) {
    if (name.starts_with("d.")) name.remove_prefix(2);
    return name == "moe.wup" || name == "moe.wdown";
  }

  void share(Type& type) const {
    type.shape[0] /= size_;
    type = placed(std::move(type), axes_, Placement::shard(0));
  }

  void share_experts() {
    for (DraftSegment* segment : {&layer_.forward, &layer_.backward})
      for (Slot& slot : segment->segment.slots)
        if (is_expert_weight(slot.name)) share(slot.type);
    for (UnitParameter& p : layer_.parameters)
      if (is_expert_weight(p.name)) share(p.type);
    for (const Unit& u : draft_.units)
      if (u.kind == kind_)
        for (size_t i = 0; i < u.parameters.size(); ++i)
          draft_.plan.parameters[u.parameters[i].index()].type = layer_.parameters[i].type;
  }

  /// What is at home is in groups; what only the experts see is with them.
  void place_rows(DraftSegment& segment) const {
    for (Slot& slot : segment.segment.slots) {
      if (!is_rows_of_experts(slot)) continue;
      std::string_view name = slot.name;
      if (name.starts_with("d.")) name.remove_prefix(2);
      if (name == "rows.u" || name == "rows.a") {
        slot.type = with_experts(slot.type);
      } else {
        slot.type.shape[0] = size_;
        if (name == "rows.counts")
          slot.type.shape[2] /= size_;
        else
          slot.type.shape[1] = rows_of_group_;
      }
    }
  }

  /// The type of rows, or of counts, that have come from all ranks.
  Type with_experts(Type type) const {
    const bool counts = type.dtype == DType::i32;
    type.shape[1] = counts ? type.shape[1] * size_ : (room_ > 0 ? rows_of_all_ : size_ * size_ * rows_of_group_);
    type.shape[0] = 1;
    return placed(std::move(type), axes_, Placement::shard(0));
  }

  SlotId away(DraftSegment& segment, std::string_view name, Use use) const {
    const Slot& home = segment.slot(segment.find(name));
    return segment.add(there(name), with_experts(home.type), use,
                       use == Use::kSaved ? BufferClass::kActivation : BufferClass::kTemporary);
  }
  static void make_local(DraftSegment& segment, std::string_view name) {
    const SlotId slot = segment.find(name);
    segment.uses[slot.index()].use = Use::kLocal;
    segment.slot(slot).kind = SlotKind::kLocal;
    segment.slot(slot).cls = BufferClass::kTemporary;
  }

  template <class Change>
  static void for_ops(DraftSegment& segment, std::string_view label, const Change& change) {
    for (Step& step : segment.segment.steps)
      if (Op& op = std::get<Op>(step); op.label == label) change(op);
  }
  void read_away(DraftSegment& segment, std::string_view label, std::string_view name) const {
    const SlotId old = segment.find(name), to = segment.find(there(name));
    for_ops(segment, label, [&](Op& op) { std::ranges::replace(op.reads, old, to); });
  }

  /// Experts multiply the rows that have come, as counted there. As many are expected as went: routes are taken to be even.
  void count_rows(DraftSegment& segment) const {
    const SlotId home = segment.find("rows.counts"), to = segment.find(there("rows.counts"));
    for (Step& step : segment.segment.steps) {
      Op& op = std::get<Op>(step);
      if (auto* w = std::get_if<GroupedLinear>(&op.work)) {
        w->sources = size_;
        std::ranges::replace(op.reads, home, to);
      } else if (auto* a = std::get_if<Activation>(&op.work); a != nullptr && op.label == "mlp.act") {
        // With a capacity rows are counted at home too.
        if (a->counted)
          std::ranges::replace(op.reads, home, to);
        else
          op.reads.push_back(to);
        a->counted = true;
        a->rows = rows_;
      }
    }
  }

  Op move(std::vector<SlotId> reads, SlotId to, std::string label) const {
    Op op;
    op.work = Collective{CollectiveKind::kAllToAll, ReduceOp::kSum, comm_, draft_.algorithm()};
    op.reads = std::move(reads);
    op.writes = {to};
    op.label = std::move(label);
    op.strategy = kExpertParallelName;
    return op;
  }
  Op move_rows(std::vector<SlotId> reads, SlotId to, std::string label) const {
    Op op = move(std::move(reads), to, std::move(label));
    auto& c = std::get<Collective>(op.work);
    c.room = room_;
    // Known before `emit` gives streams the workspaces in which rows that go by node are staged.
    if (c.algorithm == Algorithm::kHierarchical)
      c.per_node = group_per_node(draft_.plan.mesh, draft_.plan.comms[comm_.index()], ranks_per_node(draft_.config));
    return op;
  }
  Op exchange(DraftSegment& segment, std::string_view name, std::string label) const {
    return move({segment.find(name)}, segment.find(there(name)), std::move(label));
  }
  Op go(DraftSegment& s, std::string_view rows, std::string label) const {
    Op op = move_rows({s.find(rows), s.find("rows.counts"), s.find(there("rows.counts"))}, s.find(there(rows)), std::move(label));
    // On GPUs rows go from rank to rank, whatever the plan says.
    if (draft_.config.backend != BackendKind::kCuda) cross_once(s.segment, draft_.config.model.experts, op);
    return op;
  }
  /// What experts made of rows, by the product of that label, comes home before it is first read.
  void come_back(DraftSegment& s, std::string_view product, std::string label) const {
    auto& steps = s.segment.steps;
    const auto by = std::ranges::find_if(steps, [&](const Step& step) {
      const Op& op = std::get<Op>(step);
      return op.label == product && std::holds_alternative<GroupedLinear>(op.work) && phase_of(op.work) != Phase::kW;
    });
    SHARDLAB_CHECK(by != steps.end(), "{} has no {}", s.segment.name, product);
    SlotId& made = std::get<Op>(*by).writes[0];
    const SlotId home = made;
    made = away(s, std::string(s.slot(home).name), Use::kLocal);
    const auto reads = [&](const Step& step) {
      return std::ranges::find(std::get<Op>(step).reads, home) != std::get<Op>(step).reads.end();
    };
    steps.insert(std::ranges::find_if(steps, reads),
                 move_rows({made, s.find(there("rows.counts")), s.find("rows.counts")}, home, std::move(label)));
  }

  /// Puts an op before, or behind, the first op of that label.
  static void insert(DraftSegment& segment, std::string_view label, Op op, bool behind) {
    auto& steps = segment.segment.steps;
    const auto at = std::ranges::find_if(steps, [&](const Step& s) { return std::get<Op>(s).label == label; });
    SHARDLAB_CHECK(at != steps.end(), "{} has no {}", segment.segment.name, label);
    steps.insert(behind ? at + 1 : at, std::move(op));
  }

  Draft& draft_;
  UnitKind kind_;
  UnitTemplate& layer_;
  AxisSet axes_;
  int size_;
  CommId comm_;
  int64_t rows_ = 0;           ///< of the rank's own tokens where routes are even
  int64_t rows_of_group_ = 0;  ///< for the experts of one rank that there is room for at home
  int64_t room_ = 0;           ///< rows that one rank sends another at most, where experts have a capacity ...
  int64_t rows_of_all_ = 0;    ///< ... and that all ranks together send one
};

}  // namespace

void expert_parallel(Draft& draft) {
  const std::string& placed = draft.config.layout.expert_placement;
  if (!placed.empty()) {
    auto listed = read_placements(placed);
    SHARDLAB_CHECK(listed, "expert_placement={} of `{}` has not been decided", placed, draft.config.name);
    draft.plan.expert_placement = std::move(*listed);
  }
  for (const UnitKind kind : draft.mixture_kinds()) ExpertParallel(draft, kind).run();
}

}  // namespace shardlab::strategies
