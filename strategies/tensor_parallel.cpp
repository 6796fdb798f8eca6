// Tensor parallelism: each rank of a `tp` group holds a slice of every matrix and works on all tokens.
//
//   column parallel   wqkv[(a+2k)d/t, h], wup[f/t, h]: rank r makes its own slice of q, k, v (whole heads) and of the hidden layer
//   row parallel      wo[h, ad/t], wdown[h, f/t]: each rank's product is a partial sum of the whole output
//   experts           each as a feed-forward: moe.wup[e, 2f/t, h], moe.wdown[e, h, f/t]; routers are whole, and choose alike on all ranks.
//                     With expert_tp 1 experts stay whole (whole_experts.cpp), and shared ones alone are cut
//   vocabulary        embed.tokens[V/t, h]: look-ups outside the slice give 0, so the embedding is a partial sum;
//                     head[V/t, h]: each rank has a slice of the logits, and the loss is reduced from three numbers a token
//
// Fewer kv heads than ranks: the rows of wqkv are cut evenly as ever, and a rank's rows are then no whole heads. Ranks gather the rows of
// q, k and v that their products made; each takes its query heads and a copy of the kv head that these share. Backward gathers the
// gradients by head and adds up the copies' before the rows are cut again, so weights, their gradients and checkpoints are those of any t.
//
// What the slices of experts make of a row is a partial sum. Weighting and adding up a token's rows is linear, so that partial sums of tokens
// are summed, as after a feed-forward. In canonical mode rows are summed before: a row is then the one row of a single rank, to the bit.
//
// Gammas of norms of heads are whole, and their gradients sums over the heads of all ranks: by leaf of each sequence, as the order of
// the one sum on one rank has it (docs/canonical-order.md).
//
// The paper's operators f and g are the two places where a partial sum becomes whole: g is the all-reduce after a row-parallel
// product in forward, f the all-reduce of the input's gradient of a column-parallel product in backward.
//
// Shapes   qkv[b,s,(a+2k)d/t] o[b,s,ad/t] u[b,s,f/t] logits[b,s,V/t]; everything on the residual stream is whole
// Adds     per layer and micro-batch 4 all-reduces of b*s*h (2 forward, 2 backward): 8 b s h (t-1)/t elements sent by each rank;
//          embedding 1, head 1 of b*s*h, loss b*s (max) and 2 b*s (sums). With k < t kv heads per layer and micro-batch 2 all-gathers:
//          of b s (a+2k) d in forward, of b s (a+2t) d in backward, of which each rank sends (t-1)/t. A layer with experts: an
//          all-reduce of b s k more (weights' gradients); canonical: of rows, b s k h, in place of tokens, and with shared experts of tokens
//          beside them. Norms of heads: 2 of b d, canonical 32 b d
// Memory   matrices, their gradients and states, and qkv, o, u, a, logits: 1/t
// Refuses  heads, ffn, moe_ffn or vocab not divisible by t; kv_heads that neither divide t nor are divided by it
// Paper    Shoeybi et al., "Megatron-LM" (2019), section 3; Ainslie et al., "GQA" (2023), for shared kv heads
#include "strategies/tensor_parallel.h"

#include <algorithm>
#include <initializer_list>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "plan/base/tree.h"
#include "strategies/draft.h"
#include "strategies/row_parts.h"

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
/// Where a layer has experts: those that tokens choose, and those that every token passes.
constexpr SlicedSlot kExpertSlices[] = {{"moe.wup", 1}, {"moe.wdown", 2}, {"rows.u", 2}, {"rows.a", 2}};
constexpr SlicedSlot kSharedSlices[] = {{"moe.shared.wup", 0}, {"moe.shared.wdown", 1}, {"shared.u", 2}, {"shared.a", 2}};
/// What norms of heads have beside the rows of q, k and v.
constexpr SlicedSlot kHeadNormSlices[] = {{"qkv.raw", 2}, {"attn.qk_norm.stats", 2}};
/// Of latent attention: what makes heads, and heads. What is narrow is whole on every rank.
constexpr SlicedSlot kLatentSlices[] = {{"attn.wq", 0}, {"attn.wq_b", 0}, {"attn.wkv_b", 0}, {"latent.q", 2}, {"latent.kv", 2}};
constexpr SlicedSlot kHeadSlices[] = {{"embed.tokens", 0}, {"head.weight", 0}, {"logits", 2}};

void slice(Type& type, AxisSet axes, int size, int dim) {
  type.shape[dim] /= size;
  type = placed(std::move(type), axes, Placement::shard(dim));
}

void slice_slots(DraftSegment& segment, std::span<const SlicedSlot> slices, AxisSet axes, int size) {
  for (const SlicedSlot& s : slices)
    for (const std::string& name : {std::string(s.name), "d." + std::string(s.name)})
      if (const auto slot = segment.find_if(name)) slice(segment.slot(*slot).type, axes, size, s.dim);
}

/// Attention and RoPE work on this rank's heads.
void slice_heads(DraftSegment& segment, int size) {
  for (Step& step : segment.segment.steps)
    std::visit(Overload{[&](Rope& r) {
                          if (r.kv_heads >= size) r.heads /= size, r.kv_heads /= size;  // else rows of all heads are rotated
                        },
                        [&](LatentHeads& l) { l.heads /= size; }, [&](HeadNorm& n) { n.heads /= size, n.kv_heads /= size; },
                        [&](Attention& a) { a.heads /= size, a.kv_heads = std::max(a.kv_heads / size, 1); }, [](auto&) {}},
               std::get<Op>(step).work);
}

class TensorParallel {
 public:
  explicit TensorParallel(Draft& draft)
      : draft_(draft), axes_(tensor_axes(draft.plan.mesh)), size_(draft.config.layout.tp), comm_(draft.comm("tp", axes_)) {}

  void run() {
    slice_unit(UnitKind::kEmbed, {kEmbedSlices});
    slice_unit(UnitKind::kHead, {kHeadSlices});
    sum(draft_.of(UnitKind::kEmbed).forward, "x", "g");
    for (const UnitKind kind : draft_.layer_kinds()) layer(kind);
    sum(draft_.of(UnitKind::kHead).backward, "d.final.norm.y", "head.f");
    split_loss(draft_.of(UnitKind::kHead).forward);
  }

 private:
  /// What ranks a partial sum is over, and how they meet.
  struct Over {
    AxisSet axes;
    CommId comm;
  };

  void layer(UnitKind kind) {
    UnitTemplate& layer = draft_.of(kind);
    slice_heads(layer.forward, size_);
    slice_heads(layer.backward, size_);
    slice_unit(kind, {kLayerSlices, kSharedSlices, kHeadNormSlices, kLatentSlices});
    if (draft_.config.model.kv_heads < size_) share_kv_heads(layer);
    if (draft_.config.model.qk_norm) sum_head_norms(layer.backward);
    sum(layer.forward, "attn.z", "attn.g");
    if (layer.forward.find_if("moe.logits")) {
      experts(kind);
    } else {
      sum(layer.forward, "mlp.z", "mlp.g");
      sum(layer.backward, "d.mlp.norm.y", "mlp.f");
    }
    if (draft_.config.model.is_latent())
      sum_latents(layer.backward);
    else
      sum(layer.backward, "d.attn.norm.y", "attn.f");
  }

  /// Gradients of what is narrow are sums over the heads of all ranks. From there back every rank works on the whole.
  void sum_latents(DraftSegment& backward) {
    sum(backward, "d.latent.k_rope", "attn.k_rope.f");
    draft_.config.model.latent.q_rank > 0 ? sum(backward, "d.attn.q_a.norm.y", "attn.q_a.f")
                                          : sum(backward, "d.attn.norm.y", "attn.f");
    sum(backward, "d.attn.kv_a.norm.y", "attn.kv_a.f");
  }

  void experts(UnitKind kind) {
    UnitTemplate& layer = draft_.of(kind);
    if (const AxisSet slices = slice_axes(draft_); !slices.empty()) {
      slice_unit(kind, {kExpertSlices}, slices);
      if (!draft_.config.canonical && slices == axes_) return sum_tokens(layer);
      const Over over{slices, slices == axes_ ? comm_ : draft_.comm(kSlicesAxis, slices)};
      draft_.config.canonical ? sum_rows(layer, over) : sum_routed_tokens(layer, over);
    }
    sum_shared(layer);
  }

  void sum_rows(UnitTemplate& layer, const Over& over) {
    sum(layer.forward, "rows.out", "moe.g", over);
    sum(layer.backward, "d.rows.in", "moe.f", over);
  }

  /// Partial sums of the rows of a group's own tokens are added up apart from those of shared experts, which are of all tokens.
  void sum_routed_tokens(UnitTemplate& layer, const Over& over) {
    for (const auto& [segment, rows] : {std::pair{&layer.forward, "rows.out"}, {&layer.backward, "d.rows.in"}})
      segment->slot(segment->find(rows)).type = partial(segment->slot(segment->find(rows)).type, over.axes);
    Slot& kept = layer.backward.slot(layer.backward.find("rows.out"));
    kept.type = partial(kept.type, over.axes);
    sum(layer.forward, "mlp.z", "moe.g", over);
    sum(layer.backward, "d.mlp.norm.y", "moe.f", over);
    sum(layer.backward, "d.moe.weights", "moe.weights.f", over);
  }

  void sum_shared(UnitTemplate& layer) {
    if (!layer.forward.find_if("shared.z")) return;
    sum(layer.forward, "shared.z", "moe.shared.g");
    sum(layer.backward, "d.shared.norm.y", "moe.shared.f");
  }

  /// Partial sums of rows, and those of shared experts, are added up to partial sums of tokens.
  void sum_tokens(UnitTemplate& layer) {
    const auto leave_partial = [&](DraftSegment& segment, std::string_view name) {
      if (const auto slot = segment.find_if(name)) segment.slot(*slot).type = partial(segment.slot(*slot).type);
    };
    const bool shares = layer.forward.find_if("shared.z").has_value();
    for (DraftSegment* segment : {&layer.forward, &layer.backward})
      for (const std::string_view name : {"rows.out", "shared.z", "shared.y", "d.rows.in", "d.shared.norm.y"})
        leave_partial(*segment, name);
    sum(layer.forward, "mlp.z", "mlp.g", shares ? 2 : 1);
    sum(layer.backward, "d.mlp.norm.y", "mlp.f", shares ? 2 : 1);
    sum(layer.backward, "d.moe.weights", "moe.f");
    if (layer.backward.find_if("d.shared.gate")) sum(layer.backward, "d.shared.gate", "moe.shared.gate.f");
  }

  Type partial(Type type) const { return partial(std::move(type), axes_); }
  static Type partial(Type type, AxisSet axes) { return placed(std::move(type), axes, Placement::partial()); }

  /// Gradients of the gammas: sums over the rank's heads are added up over the ranks, leaf by leaf, and then over leaves and sequences.
  void sum_head_norms(DraftSegment& segment) {
    auto& steps = segment.segment.steps;
    const auto at = std::ranges::find_if(steps, [](const Step& s) {
      const Op& op = std::get<Op>(s);
      return std::holds_alternative<HeadNorm>(op.work) && phase_of(op.work) == Phase::kW;
    });
    SHARDLAB_CHECK(at != steps.end(), "{} has no gradient of norms of heads", segment.segment.name);
    Op tokens = std::get<Op>(*at), sequences = tokens;
    std::get<HeadNorm>(tokens.work).over = SumOver::kTokens;
    std::get<HeadNorm>(sequences.work).over = SumOver::kSequences;
    tokens.label += ".tokens";
    tokens.strategy = sequences.strategy = kTensorParallelName;
    sequences.reads.clear();
    std::vector<Step> sums;
    for (SlotId& write : tokens.writes) {
      const std::string gradient = segment.slot(write).name;
      Type type = segment.slot(tokens.reads[0]).type;  // dy: it says how sequences are dealt
      for (Placement& place : type.place)
        if (place == Placement::shard(1)) place = Placement::partial();
      type.shape = {type.shape[0], draft_.config.canonical ? kContractionLeaves / draft_.config.layout.cp : 1,
                    segment.slot(write).type.shape.last()};
      type.dtype = DType::f32;  // parts of a sum, whatever the gradient that they are of
      type = placed(std::move(type), axes_, Placement::replicate());
      const SlotId whole = segment.add(gradient + ".tokens", type, Use::kLocal, BufferClass::kTemporary);
      write = segment.add_view(gradient + ".tokens.part", whole, partial(type));
      sequences.reads.push_back(whole);
      sums.emplace_back(all_reduce(write, whole, gradient.substr(2) + ".all"));
    }
    *at = std::move(tokens);
    sums.emplace_back(std::move(sequences));
    steps.insert(at + 1, std::make_move_iterator(sums.begin()), std::make_move_iterator(sums.end()));
  }

  void slice_unit(UnitKind kind, std::initializer_list<std::span<const SlicedSlot>> lists) { slice_unit(kind, lists, axes_); }
  void slice_unit(UnitKind kind, std::initializer_list<std::span<const SlicedSlot>> lists, AxisSet axes) {
    UnitTemplate& unit = draft_.of(kind);
    const int size = draft_.plan.mesh.size(axes);
    for (const std::span<const SlicedSlot> slices : lists) {
      slice_slots(unit.forward, slices, axes, size);
      slice_slots(unit.backward, slices, axes, size);
      for (UnitParameter& p : unit.parameters)
        for (const SlicedSlot& s : slices)
          if (p.name == s.name) slice(p.type, axes, size, s.dim);
    }
    for (const Unit& u : draft_.units)
      if (u.kind == kind)
        for (size_t i = 0; i < u.parameters.size(); ++i)
          draft_.plan.parameters[u.parameters[i].index()].type = unit.parameters[i].type;
  }

  /// An op between the rows that products hold and the heads that attention takes.
  static Step between(Work work, SlotId from, SlotId to, std::string label) {
    Op op;
    op.work = std::move(work);
    op.reads = {from};
    op.writes = {to};
    op.label = std::move(label);
    op.strategy = kTensorParallelName;
    return op;
  }

  void share_kv_heads(UnitTemplate& layer) {
    const Model& m = draft_.config.model;
    const Type rows = layer.forward.slot(layer.forward.find("qkv")).type;  // even slices
    Type heads = rows, all = placed(rows, axes_, Placement::replicate());
    heads.shape[2] = (m.heads / size_ + 2) * m.head_dim;
    all.shape[2] *= size_;
    for (DraftSegment* segment : {&layer.forward, &layer.backward}) segment->slot(segment->find("qkv")).type = heads;
    layer.backward.slot(layer.backward.find("d.qkv")).type = heads;

    const int64_t s = rows.shape[1], width = heads.shape[2];
    const Regroup copies{.parts = size_,
                         .copies = size_ / static_cast<int>(m.kv_heads),
                         .kv_heads = static_cast<int>(m.kv_heads),
                         .head_dim = static_cast<int>(m.head_dim)};
    const Regroup even{.parts = size_};
    const Collective gather{CollectiveKind::kAllGather, ReduceOp::kSum, comm_, draft_.algorithm()};
    const auto local = [&](DraftSegment& segment, std::string name, Type type) {
      return segment.add(std::move(name), std::move(type), Use::kLocal, BufferClass::kTemporary);
    };
    const auto joining = [](Regroup w) {
      w.join = true;
      return w;
    };
    /// All ranks' parts of rows, and this rank's own among them.
    const auto parts = [&](DraftSegment& segment, const std::string& name, int64_t part_width) {
      const SlotId of_all = local(segment, name, in_parts(all, size_, s, part_width, axes_, Placement::replicate()));
      const SlotId own = segment.add_view(name + ".own", of_all, in_parts(all, 1, s, part_width, axes_, Placement::shard(0)));
      segment.slot(own).view->shard_axes = axes_;
      return std::pair{of_all, own};
    };

    // Parts of rows lie one behind the other, so that a gather is one piece of memory a rank.
    DraftSegment& forward = layer.forward;
    const SlotId qkv = forward.find("qkv"), part = local(forward, "qkv.part", rows), whole = local(forward, "qkv.all", all);
    const SlotId own = local(forward, "qkv.own", in_parts(all, 1, s, rows.shape[2], axes_, Placement::shard(0))),
                 by_rows = local(forward, "qkv.rows", in_parts(all, size_, s, rows.shape[2], axes_, Placement::replicate()));
    const auto [by_heads, mine] = parts(forward, "qkv.heads", width);
    rewrite_rows(forward, qkv, part, whole,
                 {between(even, part, own, "attn.rows.split"), between(gather, own, by_rows, "attn.rows"),
                  between(joining(even), by_rows, whole, "attn.rows.join")},
                 {between(copies, whole, by_heads, "attn.groups.split"), between(joining(even), mine, qkv, "attn.groups.join")});

    DraftSegment& backward = layer.backward;
    const SlotId d_qkv = backward.find("d.qkv"), d_part = local(backward, "d.qkv.part", rows),
                 d_whole = local(backward, "d.qkv.all", all);
    const SlotId d_own = local(backward, "d.qkv.own", in_parts(all, 1, s, width, axes_, Placement::shard(0))),
                 d_by_heads = local(backward, "d.qkv.heads", in_parts(all, size_, s, width, axes_, Placement::replicate()));
    const auto [d_by_rows, d_mine] = parts(backward, "d.qkv.rows", rows.shape[2]);
    rewrite_rows(
        backward, d_qkv, d_part, d_whole,
        {between(even, d_qkv, d_own, "attn.d.groups.split"), between(gather, d_own, d_by_heads, "attn.d.groups"),
         between(joining(copies), d_by_heads, d_whole, "attn.d.groups.sum")},
        {between(even, d_whole, d_by_rows, "attn.d.rows.split"), between(joining(even), d_mine, d_part, "attn.d.rows.join")});
  }

  /// Products use `rows` where they used `heads`, and rotation uses `whole`. `first` goes behind the op that makes the first of these
  /// (a product or the attention core), `then` before the op that takes the last.
  static void rewrite_rows(DraftSegment& segment, SlotId heads, SlotId rows, SlotId whole, std::vector<Step> first,
                           std::vector<Step> then) {
    std::vector<Step> steps;
    bool made = false, taken = false;
    for (Step& step : std::exchange(segment.segment.steps, {})) {
      Op op = std::move(std::get<Op>(step));
      const bool product = std::holds_alternative<Linear>(op.work), rotates = std::holds_alternative<Rope>(op.work);
      const bool reads = std::ranges::find(op.reads, heads) != op.reads.end();
      const bool writes = std::ranges::find(op.writes, heads) != op.writes.end();
      if (product || rotates)
        for (auto* operands : {&op.reads, &op.writes}) std::ranges::replace(*operands, heads, rotates ? whole : rows);
      if (reads && !rotates && !taken) {
        steps.insert(steps.end(), then.begin(), then.end());
        taken = true;
      }
      steps.emplace_back(std::move(op));
      if (writes && !rotates && !made) {
        steps.insert(steps.end(), first.begin(), first.end());
        made = true;
      }
    }
    SHARDLAB_CHECK(made && taken, "{} makes no rows of q, k and v for attention", segment.segment.name);
    segment.segment.steps = std::move(steps);
  }

  Op all_reduce(SlotId from, SlotId to, std::string label, ReduceOp reduce = ReduceOp::kSum) const {
    return all_reduce(from, to, std::move(label), reduce, comm_);
  }
  Op all_reduce(SlotId from, SlotId to, std::string label, ReduceOp reduce, CommId comm) const {
    Op op;
    op.work = Collective{CollectiveKind::kAllReduce, reduce, comm, draft_.algorithm()};
    op.reads = {from};
    op.writes = {to};
    op.label = std::move(label);
    op.strategy = kTensorParallelName;
    return op;
  }

  /// Makes the result of the first `writers` writers of `name` a partial sum, and adds an all-reduce right after the last. The slot itself
  /// keeps the whole type, since other segments see that; the partial sum is a view of it.
  void sum(DraftSegment& segment, std::string_view name, std::string label, int writers = 1) {
    sum(segment, name, std::move(label), {axes_, comm_}, writers);
  }
  void sum(DraftSegment& segment, std::string_view name, std::string label, const Over& over, int writers = 1) {
    const SlotId whole = segment.find(name);
    const SlotId part = segment.add_view(std::string(name) + ".part", whole, partial(segment.slot(whole).type, over.axes));
    for (size_t i = 0; i < segment.segment.steps.size(); ++i) {
      Op& op = std::get<Op>(segment.segment.steps[i]);
      const auto write = std::ranges::find(op.writes, whole);
      if (write == op.writes.end()) continue;
      *write = part;
      std::ranges::replace(op.reads, whole, part);  // what the writers before left
      if (--writers > 0) continue;
      segment.segment.steps.insert(segment.segment.steps.begin() + static_cast<std::ptrdiff_t>(i) + 1,
                                   all_reduce(part, whole, std::move(label), ReduceOp::kSum, over.comm));
      return;
    }
    SHARDLAB_CHECK(false, "too few ops of {} write {}", segment.segment.name, name);
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
    const SlotId max_part = head.add_view("loss.max.part", max, placed(one, axes_, partial));
    const SlotId sums_part = head.add_view("loss.sums.part", sums, placed(two, axes_, partial));
    const auto part = [&](CrossEntropy::Part p, std::vector<SlotId> reads, std::vector<SlotId> writes, std::string label) {
      Op op = loss;
      op.work = fused;
      std::get<CrossEntropy>(op.work).part = p;
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
  AxisSet axes_;
  int size_;
  CommId comm_;
};

}  // namespace

void tensor_parallel(Draft& draft) { TensorParallel(draft).run(); }

}  // namespace shardlab::strategies
