// Tensor parallelism: each rank of a `tp` group holds a slice of every matrix and works on all tokens.
//
//   column parallel   wqkv[(a+2k)d/t, h], wup[f/t, h]: rank r makes its own slice of q, k, v (whole heads) and of the hidden layer
//   row parallel      wo[h, ad/t], wdown[h, f/t]: each rank's product is a partial sum of the whole output
//   vocabulary        embed.tokens[V/t, h]: look-ups outside the slice give 0, so the embedding is a partial sum;
//                     head[V/t, h]: each rank has a slice of the logits, and the loss is reduced from three numbers a token
//
// The paper's operators f and g are the two places where a partial sum becomes whole: g is the all-reduce after a row-parallel
// product in forward, f the all-reduce of the input's gradient of a column-parallel product in backward.
//
// Shapes   qkv[b,s,(a+2k)d/t] o[b,s,ad/t] u[b,s,f/t] logits[b,s,V/t]; everything on the residual stream is whole
// Adds     per layer and micro-batch 4 all-reduces of b*s*h (2 forward, 2 backward): 8 b s h (t-1)/t elements sent by each rank;
//          embedding 1, head 1 of b*s*h, loss b*s (max) and 2 b*s (sums)
// Memory   matrices, their gradients and states, and qkv, o, u, a, logits: 1/t
// Refuses  heads, kv_heads, ffn or vocab not divisible by t
// Paper    Shoeybi et al., "Megatron-LM" (2019), section 3
#include "strategies/tensor_parallel.h"

#include <algorithm>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "strategies/draft.h"

namespace shardlab::strategies {
namespace {

constexpr std::string_view kTensorParallelName = "tensor-parallel";

struct SlicedSlot {
  std::string_view name;
  int dim;
};

/// The dim in which each slot is cut, gradients ("d.") included if the name has one.
constexpr SlicedSlot kEmbedSlices[] = {{"embed.tokens", 0}};
constexpr SlicedSlot kLayerSlices[] = {{"attn.wqkv", 0}, {"attn.bqkv", 0}, {"attn.wo", 1}, {"mlp.wup", 0},
                                       {"mlp.bup", 0},   {"mlp.wdown", 1}, {"qkv", 2},     {"o", 2},
                                       {"lse", 1},       {"u", 2},         {"a", 2}};
constexpr SlicedSlot kHeadSlices[] = {{"embed.tokens", 0}, {"head.weight", 0}, {"logits", 2}};

void slice(Type& type, int axis, int size, int dim) {
  type.shape[dim] /= size;
  type.place[static_cast<size_t>(axis)] = Placement::shard(dim);
}

void slice_slots(DraftSegment& segment, std::span<const SlicedSlot> slices, int axis, int size) {
  for (const SlicedSlot& s : slices)
    for (const std::string& name : {std::string(s.name), "d." + std::string(s.name)})
      if (const auto slot = segment.find_if(name)) slice(segment.slot(*slot).type, axis, size, s.dim);
}

/// Attention and RoPE work on this rank's heads.
void slice_heads(DraftSegment& segment, int size) {
  for (Step& step : segment.segment.steps)
    std::visit(Overload{[&](Rope& r) { r.heads /= size, r.kv_heads /= size; },
                        [&](Attention& a) { a.heads /= size, a.kv_heads /= size; }, [](auto&) {}},
               std::get<Op>(step).work);
}

class TensorParallel {
 public:
  explicit TensorParallel(Draft& draft)
      : draft_(draft),
        axis_(draft.plan.mesh.axis("tp")),
        size_(draft.config.layout.tp),
        comm_(draft.comm("tp", AxisSet::of(axis_))) {}

  void run() {
    slice_unit(UnitKind::kEmbed, kEmbedSlices);
    slice_unit(UnitKind::kLayer, kLayerSlices);
    slice_unit(UnitKind::kHead, kHeadSlices);
    sum(draft_.of(UnitKind::kEmbed).forward, "x", "g");
    sum(draft_.of(UnitKind::kLayer).forward, "attn.z", "attn.g");
    sum(draft_.of(UnitKind::kLayer).forward, "mlp.z", "mlp.g");
    sum(draft_.of(UnitKind::kLayer).backward, "d.mlp.norm.y", "mlp.f");
    sum(draft_.of(UnitKind::kLayer).backward, "d.attn.norm.y", "attn.f");
    sum(draft_.of(UnitKind::kHead).backward, "d.final.norm.y", "head.f");
    split_loss(draft_.of(UnitKind::kHead).forward);
  }

 private:
  void slice_unit(UnitKind kind, std::span<const SlicedSlot> slices) {
    UnitTemplate& unit = draft_.of(kind);
    slice_slots(unit.forward, slices, axis_, size_);
    slice_slots(unit.backward, slices, axis_, size_);
    slice_heads(unit.forward, size_);
    slice_heads(unit.backward, size_);
    for (UnitParameter& p : unit.parameters)
      for (const SlicedSlot& s : slices)
        if (p.name == s.name) slice(p.type, axis_, size_, s.dim);
    for (const Unit& u : draft_.units)
      if (u.kind == kind)
        for (size_t i = 0; i < u.parameters.size(); ++i)
          draft_.plan.parameters[u.parameters[i].index()].type = unit.parameters[i].type;
  }

  Op all_reduce(SlotId from, SlotId to, std::string label, ReduceOp reduce = ReduceOp::kSum) const {
    Op op;
    op.work = Collective{CollectiveKind::kAllReduce, reduce, comm_, draft_.algorithm()};
    op.reads = {from};
    op.writes = {to};
    op.label = std::move(label);
    op.strategy = kTensorParallelName;
    return op;
  }

  /// Makes the result of the first writer of `name` a partial sum, and adds an all-reduce right after it. The slot itself keeps the
  /// whole type, since other segments see that; the partial sum is a view of it.
  void sum(DraftSegment& segment, std::string_view name, std::string label) {
    const SlotId whole = segment.find(name);
    const SlotId part =
        segment.add_view(std::string(name) + ".part", whole, placed(segment.slot(whole).type, axis_, Placement::partial()));
    for (size_t i = 0; i < segment.segment.steps.size(); ++i) {
      Op& op = std::get<Op>(segment.segment.steps[i]);
      if (op.writes.empty() || op.writes.front() != whole) continue;
      op.writes.front() = part;
      segment.segment.steps.insert(segment.segment.steps.begin() + static_cast<std::ptrdiff_t>(i) + 1,
                                   all_reduce(part, whole, std::move(label)));
      return;
    }
    SHARDLAB_CHECK(false, "no op of {} writes {}", segment.segment.name, name);
  }

  /// Replaces the fused loss by its vocabulary-parallel parts: maximum, sums, gradient.
  void split_loss(DraftSegment& head) {
    std::vector<Step>& steps = head.segment.steps;
    const auto is_loss = [](const Step& s) { return std::holds_alternative<CrossEntropy>(std::get<Op>(s).work); };
    const auto at = std::ranges::find_if(steps, is_loss);
    SHARDLAB_CHECK(at != steps.end(), "the head has no loss");
    const Op loss = std::get<Op>(*at);
    const CrossEntropy fused = std::get<CrossEntropy>(loss.work);
    const SlotId logits = loss.reads[0], targets = loss.reads[1], nll = loss.writes[0];
    Type one = head.slot(targets).type;
    one.dtype = DType::f32;
    Type two = one;
    two.shape = {one.shape[0], one.shape[1], 2};
    const Placement partial = Placement::partial();
    const SlotId max = head.add("loss.max", one, Use::kLocal, BufferClass::kTemporary);
    const SlotId sums = head.add("loss.sums", two, Use::kLocal, BufferClass::kTemporary);
    const SlotId max_part = head.add_view("loss.max.part", max, placed(one, axis_, partial));
    const SlotId sums_part = head.add_view("loss.sums.part", sums, placed(two, axis_, partial));
    const auto part = [&](CrossEntropy::Part p, std::vector<SlotId> reads, std::vector<SlotId> writes, std::string label) {
      Op op = loss;
      op.work = CrossEntropy{p, fused.tokens};
      op.reads = std::move(reads);
      op.writes = std::move(writes);
      op.label = std::move(label);
      op.strategy = kTensorParallelName;
      return Step(op);
    };
    std::vector<Step> parts{part(CrossEntropy::Part::kMax, {logits}, {max_part}, "loss.max"),
                            all_reduce(max_part, max, "loss.max.all", ReduceOp::kMax),
                            part(CrossEntropy::Part::kSum, {logits, targets, max}, {sums_part}, "loss.sums"),
                            all_reduce(sums_part, sums, "loss.sums.all"),
                            part(CrossEntropy::Part::kGrad, {logits, targets, max, sums}, {nll, logits}, "loss")};
    const auto where = steps.erase(at);
    steps.insert(where, std::make_move_iterator(parts.begin()), std::make_move_iterator(parts.end()));
  }

  Draft& draft_;
  int axis_;
  int size_;
  CommId comm_;
};

}  // namespace

void tensor_parallel(Draft& draft) { TensorParallel(draft).run(); }

}  // namespace shardlab::strategies
