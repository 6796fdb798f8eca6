// Sequence parallelism: between the matrix products of tensor parallelism each rank of a `tp` group holds 1/t of the tokens of every
// sequence, where tensor parallelism alone has every rank hold, and work on, all of them.
//
// An all-reduce is a reduce-scatter and an all-gather. Tensor parallelism's all-reduce of a partial sum (its f and g) becomes the
// reduce-scatter here; the all-gather follows where the next product needs all tokens. In between lie dropout, the residual stream
// and the norms, which work token by token:
//
//   forward    norm -> all-gather -> column-parallel product ... row-parallel product -> reduce-scatter -> dropout, residual
//   backward   all-gather -> products of the row-parallel weight ... of the column-parallel weight -> reduce-scatter -> norm
//
// The input of a column-parallel product is kept as the rank's tokens and gathered once more in backward, for the weight's gradient,
// beside the gradient of the input (`overlap`); full recompute makes it again, gathered, and needs no third gather. The embedding's
// partial sum is scattered; the gradients of its tables take gathered tokens. Messages between pipeline stages carry the rank's tokens.
//
// Experts and their router work on all tokens, as products do. What a router makes of the gradients, and in canonical mode what experts
// make of tokens, every rank then has whole, and takes its tokens of. Where ranks have whole experts (whole_experts.cpp) a router works on
// the rank's own tokens, and nothing is gathered for it.
//
// Gradients of what every rank has whole, and uses on its own tokens, are partial sums: gammas and betas, and the biases of the
// row-parallel products. Each rank sums its tokens sequence by sequence, ranks add up these sums, and then sequences are added up:
// the order of the one sum on one rank (docs/canonical-order.md). So a gradient leaves backward whole, as without, and all that
// follows (accumulation, ZeRO, clipping) finds it as it was.
//
// Shapes   x, y, norms, their statistics, residuals and their gradients [b,s/t,h]; a token is on the rank that has its place
// Adds     per layer and micro-batch 4 reduce-scatters and 6 all-gathers of b*s*h in place of 4 all-reduces: 10 b s h (t-1)/t
//          elements sent by each rank, of which 2 are the second gathers; embedding one of each; head a reduce-scatter and 2
//          all-gathers. All-reduces of b*h for each gamma, beta and bias
// Memory   of a layer's activations outside of the products (x, x1, norms) 1/t, so that everything is 1/t; while a product runs its
//          gathered input b*s*h
// Refuses  a seq_len that t does not divide; ring and halving-doubling, which would keep partial sums in a part of the whole while its
//          result is several strips of it: sums are scattered by the direct algorithm, which sends as much
// Paper    Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), section 4.2
#include "strategies/sequence_parallel.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "strategies/draft.h"

namespace shardlab::strategies {
namespace {

constexpr std::string_view kSequenceParallelName = "sequence-parallel";
constexpr int kTokenDim = 1;

/// What lies between the products, by name; its gradient ("d.") too, if there is one.
constexpr std::string_view kBetween[] = {"x",
                                         "x1",
                                         "y",
                                         "attn.z",
                                         "mlp.z",
                                         "attn.norm.y",
                                         "attn.norm.y.kv",
                                         "attn.norm.y.k_rope",
                                         "mlp.norm.y",
                                         "final.norm.y",
                                         "attn.norm.stats",
                                         "mlp.norm.stats",
                                         "final.norm.stats",
                                         "moe.routed",
                                         "shared.z",
                                         "shared.gate",
                                         "shared.y",
                                         "shared.gated",
                                         "shared.norm.y"};

class SequenceParallel {
 public:
  explicit SequenceParallel(Draft& draft)
      : draft_(draft),
        axes_(tensor_axes(draft.plan.mesh)),
        slices_(draft.config.layout.folds_experts() ? slice_axes(draft) : AxisSet{}),
        size_(draft.config.layout.tp) {
    comm_of(axes_);
  }

  void run() {
    for (UnitTemplate& unit : draft_.templates) {
      rewrite(unit.forward, false);
      rewrite(unit.backward, true);
    }
  }

 private:
  void rewrite(DraftSegment& segment, bool backward) {
    routed_.clear();
    for (const Slot& slot : segment.segment.slots) routed_.push_back(is_routed(slot.type));
    for (const std::string_view name : kBetween)
      for (const std::string& n : {std::string(name), "d." + std::string(name)})
        if (const auto slot = segment.find_if(n); slot && lies_between(segment, *slot)) cut(segment.slot(*slot).type);
    scatter_sums(segment);
    gather_inputs(segment, backward);
    take_own_tokens(segment);
    reduce_gradients(segment);
  }

  /// Whether each rank has its tokens alone. Of partial sums it has all tokens; and then of what gates them too.
  bool lies_between(const DraftSegment& segment, SlotId slot) const {
    if (is_partial(segment.slot(slot).type)) return false;
    const std::string& name = segment.slot(slot).name;
    const auto shared = segment.find_if("shared.z");
    const bool gates = name.ends_with("shared.gate") || name == "d.shared.z";
    return !gates || !shared || !is_partial(segment.slot(*shared).type);
  }
  void cut(Type& type) const {
    type.shape[kTokenDim] /= size_;
    type = placed(std::move(type), axes_, Placement::shard(kTokenDim));
  }
  template <class Is>
  static bool along(const Type& type, AxisSet axes, const Is& is) {
    for (int axis = 0; axis < kMaxAxes; ++axis)
      if (axes.contains(axis) && !is(type.place[static_cast<size_t>(axis)])) return false;
    return true;
  }
  bool is_partial(const Type& type) const {
    return along(type, axes_, [](Placement p) { return p.is_partial(); });
  }
  /// Whether a rank has its own tokens of it.
  bool is_cut(const Type& type) const {
    return type.micro == Micro::kSlice && type.shape.rank == 3 &&
           along(type, axes_, [](Placement p) { return p == Placement::shard(kTokenDim); });
  }
  /// Whether it is of the tokens that a rank routes, before this pass cuts anything.
  bool is_routed(const Type& type) const {
    return type.micro == Micro::kSlice && type.shape.rank == 3 &&
           type.place[static_cast<size_t>(draft_.plan.mesh.axis("tp"))] == Placement::shard(kTokenDim);
  }

  CommId comm_of(AxisSet axes) const { return draft_.comm(axes == axes_ ? "tp" : kSlicesAxis, axes); }

  Op collective(CollectiveKind kind, SlotId from, SlotId to, std::string label, AxisSet axes) const {
    Op op;
    op.work = Collective{kind, ReduceOp::kSum, comm_of(axes), draft_.algorithm()};
    op.reads = {from};
    op.writes = {to};
    op.label = std::move(label);
    op.strategy = kSequenceParallelName;
    return op;
  }

  /// Tensor parallelism sums a view of the whole in place. What is scattered has storage of its own, as large as the whole was. The sums
  /// of a vocabulary-parallel loss, and what every rank needs of all rows and tokens of experts, stay whole.
  void scatter_sums(DraftSegment& segment) {
    for (Step& step : segment.segment.steps) {
      Op& op = std::get<Op>(step);
      auto* c = std::get_if<Collective>(&op.work);
      if (c == nullptr || c->kind != CollectiveKind::kAllReduce || c->reduce != ReduceOp::kSum) continue;
      if (!is_cut(segment.slot(op.writes[0]).type)) continue;
      c->kind = CollectiveKind::kReduceScatter;
      c->algorithm = Algorithm::kDirect;  // the others keep partial sums where the result cannot lie
      op.strategy = kSequenceParallelName;
      Slot& part = segment.slot(op.reads[0]);
      part.view.reset();
      part.kind = SlotKind::kLocal;
      part.cls = BufferClass::kTemporary;
      segment.uses[op.reads[0].index()].use = Use::kLocal;
    }
  }

  /// The axes over which an op takes tokens of other ranks: of routed tokens those of the ranks that cut each expert, who route alike.
  AxisSet gathered(const Op& op) const { return routes_own_tokens(op) ? slices_ : axes_; }

  /// Whether an op routes the tokens of the rank, or of its group, or works with their rows.
  bool routes_own_tokens(const Op& op) const {
    const auto is_routed = [&](SlotId slot) { return slot.index() < routed_.size() && routed_[slot.index()]; };
    return std::ranges::any_of(op.reads, is_routed) || std::ranges::any_of(op.writes, is_routed);
  }

  /// Matrix products, the gradients of the embedding's tables, and what deals tokens out to experts take all tokens, or those of a group.
  bool takes_all_tokens(const Op& op) const {
    if (gathered(op).empty()) return false;
    const Work& work = op.work;
    const bool table = std::holds_alternative<Embed>(work) || std::holds_alternative<Positions>(work);
    return std::holds_alternative<Linear>(work) || std::holds_alternative<Dispatch>(work) ||
           std::holds_alternative<Combine>(work) || (table && phase_of(work) == Phase::kW);
  }

  /// Partial sums are gated before they are summed: then of all tokens.
  bool gates_all_tokens(const DraftSegment& segment, const Op& op) const {
    return std::holds_alternative<Gate>(op.work) && !is_cut(segment.slot(op.reads[phase_of(op.work) == Phase::kF ? 0 : 1]).type);
  }

  /// What such an op makes of all tokens, where it is no sum over the ranks, every rank has whole: it keeps its own.
  void take_own_tokens(DraftSegment& segment) {
    std::vector<Step> steps;
    for (Step& step : std::exchange(segment.segment.steps, {})) {
      Op op = std::move(std::get<Op>(step));
      std::vector<Step> copies;
      for (SlotId& write : op.writes) {
        if (!takes_all_tokens(op) || !is_cut(segment.slot(write).type)) continue;
        const SlotId own = write;
        write = segment.add(segment.slot(own).name + ".whole", whole(segment.slot(own).type, gathered(op)), Use::kLocal,
                            BufferClass::kTemporary);
        Op copy;
        copy.work = Copy{};
        copy.reads = {write};
        copy.writes = {own};
        copy.label = op.label + ".own";
        copy.strategy = kSequenceParallelName;
        copies.emplace_back(std::move(copy));
      }
      steps.emplace_back(std::move(op));
      steps.insert(steps.end(), std::make_move_iterator(copies.begin()), std::make_move_iterator(copies.end()));
    }
    segment.segment.steps = std::move(steps);
  }

  void gather_inputs(DraftSegment& segment, bool backward) {
    std::vector<Step> steps;
    for (Step& step : std::exchange(segment.segment.steps, {})) {
      Op op = std::move(std::get<Op>(step));
      if (const AxisSet over = gathered(op); takes_all_tokens(op) || gates_all_tokens(segment, op))
        for (SlotId& read : op.reads) {
          if (!is_cut(segment.slot(read).type)) continue;
          const std::string name = segment.slot(read).name + (over == axes_ ? ".all" : ".group");
          auto all = segment.find_if(name);
          if (!all) {
            all = segment.add(name, whole(segment.slot(read).type, over), Use::kLocal, BufferClass::kTemporary);
            const bool again = backward && segment.uses[read.index()].use == Use::kSaved;
            Op gather = collective(CollectiveKind::kAllGather, read, *all, op.label + ".gather", over);
            if (again)
              steps.insert(beside_gradient_of_input(steps, op), again_of(std::move(gather), over));
            else
              steps.emplace_back(std::move(gather));
          }
          read = *all;
        }
      steps.emplace_back(std::move(op));
    }
    segment.segment.steps = std::move(steps);
  }
  /// The second gather needs nothing of backward: it runs beside the gradient of the product's input, on a stream of its own.
  Op again_of(Op gather, AxisSet over) {
    gather.label += ".again";
    if (!draft_.config.layout.overlap) return gather;
    std::get<Collective>(gather.work).comm = draft_.comm(over == axes_ ? "tp.again" : "etp.again", over);
    gather.stream = draft_.stream("tp.again");
    return gather;
  }
  /// The place before the gradient of the input of `weight`'s product, where that stands; else the end.
  static std::vector<Step>::iterator beside_gradient_of_input(std::vector<Step>& steps, const Op& weight) {
    return std::ranges::find_if(steps, [&](const Step& s) {
      const Op& op = std::get<Op>(s);
      return op.label == weight.label && std::holds_alternative<Linear>(op.work) && phase_of(op.work) == Phase::kI;
    });
  }
  Type whole(Type type, AxisSet axes) const {
    type.shape[kTokenDim] *= draft_.plan.mesh.size(axes);
    return placed(std::move(type), axes, Placement::replicate());
  }

  void reduce_gradients(DraftSegment& segment) {
    std::vector<Step> steps;
    for (Step& step : std::exchange(segment.segment.steps, {})) {
      Op op = std::move(std::get<Op>(step));
      const bool of_tokens = std::holds_alternative<Norm>(op.work) || std::holds_alternative<Residual>(op.work);
      if (!of_tokens || phase_of(op.work) != Phase::kW || !is_cut(segment.slot(op.reads[0]).type)) {
        steps.emplace_back(std::move(op));
        continue;
      }
      Op tokens = op, sequences = op;
      over_of(tokens) = SumOver::kTokens;
      over_of(sequences) = SumOver::kSequences;
      tokens.label += ".tokens";
      tokens.strategy = sequences.strategy = kSequenceParallelName;
      sequences.reads.clear();
      std::vector<Step> reductions;
      for (size_t i = 0; i < op.writes.size(); ++i) {
        const std::string gradient = segment.slot(op.writes[i]).name;
        const Type sums = sums_of(segment, op, op.writes[i]);
        const SlotId sum = segment.add(gradient + ".tokens", sums, Use::kLocal, BufferClass::kTemporary);
        const SlotId part = segment.add_view(gradient + ".tokens.part", sum, placed(sums, axes_, Placement::partial()));
        tokens.writes[i] = part;
        sequences.reads.push_back(sum);
        reductions.emplace_back(collective(CollectiveKind::kAllReduce, part, sum, gradient.substr(2) + ".all", axes_));
      }
      steps.emplace_back(std::move(tokens));
      steps.insert(steps.end(), std::make_move_iterator(reductions.begin()), std::make_move_iterator(reductions.end()));
      steps.emplace_back(std::move(sequences));
    }
    segment.segment.steps = std::move(steps);
  }
  static SumOver& over_of(Op& op) {
    auto* norm = std::get_if<Norm>(&op.work);
    return norm != nullptr ? norm->over : std::get<Residual>(op.work).over;
  }
  /// A sum of the tokens of each sequence, f32[b,1,h], of a gradient of [h]. Along context parallelism it is of a part of the sequence.
  Type sums_of(const DraftSegment& segment, const Op& op, SlotId gradient) const {
    Type type = segment.slot(op.reads[0]).type;  // dy: it says how sequences are dealt
    type.dtype = DType::f32;
    type.shape = {type.shape[0], 1, segment.slot(gradient).type.shape.last()};
    for (Placement& place : type.place)
      if (place == Placement::shard(kTokenDim)) place = Placement::partial();
    return placed(std::move(type), axes_, Placement::replicate());
  }

  Draft& draft_;
  AxisSet axes_;    ///< along which ranks have other tokens between the products ...
  AxisSet slices_;  ///< ... and of these along which they cut each expert together, where fewer do than cut all else
  int size_;
  std::vector<bool> routed_;  ///< by slot of the segment: of tokens that were cut before this pass
};

}  // namespace

void sequence_parallel(Draft& draft) { SequenceParallel(draft).run(); }

}  // namespace shardlab::strategies
