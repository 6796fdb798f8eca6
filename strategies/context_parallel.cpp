// Context parallelism: each rank of a `cp` group holds a part of every sequence. Everything but attention works on tokens by themselves, so
// that activations, and with them the ranks' memory, are 1/c; gradients of parameters are partial sums, which are reduced with those of
// data parallelism. Who attends to the tokens of other ranks is the case's `cp_kind`.
//
//   all-gather   keys and values of the whole sequence are gathered, and once more in backward, where their gradients are scattered
//   ring         keys and values go once around the ranks, a block at a time, the next one on its way while one is worked on; backward
//                sends them around again, and each block's gradients with it, which come home with the last hop
//   zigzag       the same, over an order of tokens in which every rank has as much causal work: chunks i and 2c-1-i (all-gather too)
//   striped      the same, every c-th token
//   ulysses      an all-to-all turns parts of the sequence with all heads into whole sequences of some heads, and another turns the
//                result back; in backward both go the other way. Where there are fewer kv heads than ranks several ranks get a copy
//                of one, and the copies' gradients are added up where they came from.
//   usp          both: ranks of the axis `ulysses`, neighbours, exchange heads for their part of the sequence; rings of the axis `cp`, one
//                for each of their heads, pass keys and values on, in zigzag order
//
// The running output of blocks and its log-sum-exp are fp32: in 16 bits the error of backward grows with every block. In canonical mode
// blocks are kept apart and merged by the tree (docs/canonical-order.md), and each block's gradients go home by themselves.
//
// Shapes   everything [b,s/c,..]; kv[b,s/c,2kd] on its way, kv.all[b,s,2kd]; ulysses: attention's qkv[b,s,(a+2k)d/c], o[b,s,ad/c]
// Adds     per layer and micro-batch, elements that each rank sends, n = b s/c 2 k d:
//          all-gather: 3 n (c-1) (two gathers, a scatter); rings: 2 n (c-1) + n c; ulysses: four all-to-alls, of qkv and o, and of
//          their gradients: 2 b s/c (2 a + 2 max(k, c)) d (c-1)/c. Canonical: gradients of k and v by query head. A layer of e
//          experts with a loss for even use: an all-reduce of b e; of experts with a capacity: a gather of b s top_k, forward
// Memory   activations 1/c; rings two blocks of k and v, and in backward two of their gradients; all-gather k and v of the whole;
//          ulysses keeps qkv and o of its heads, and o of its tokens. Canonical rings: all blocks' results
// Refuses  sequences that c (zigzag, all-gather: 2 c) does not divide; ulysses: heads that c (times t) does not divide
// Paper    Liu et al., "Ring Attention" (2023); Brandon et al., "Striped Attention" (2023); Llama Team, "The Llama 3 Herd of Models"
//          (2024), section 3.3.2; Jacobs et al., "DeepSpeed Ulysses" (2023); Fang and Zhao, "USP" (2024)
#include "strategies/context_parallel.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "strategies/draft.h"
#include "strategies/expert_loads.h"
#include "strategies/row_parts.h"

namespace shardlab::strategies {
namespace {

constexpr std::string_view kContextParallelName = "context-parallel";
/// The label of the op that completes the attention core: recompute knows it by this name.
constexpr std::string_view kCore = "attn.core";

/// Where the attention core stands in a segment.
size_t core_of(const DraftSegment& segment) {
  const auto& steps = segment.segment.steps;
  const auto is_core = [](const Step& s) { return std::holds_alternative<Attention>(std::get<Op>(s).work); };
  const auto at = std::ranges::find_if(steps, is_core);
  SHARDLAB_CHECK(at != steps.end(), "{} has no attention", segment.segment.name);
  return static_cast<size_t>(at - steps.begin());
}

/// Lets every op but the attention core use `to` where it used `from`.
void retarget(DraftSegment& segment, SlotId from, SlotId to) {
  for (Step& step : segment.segment.steps) {
    Op& op = std::get<Op>(step);
    if (std::holds_alternative<Attention>(op.work)) continue;
    for (auto* operands : {&op.reads, &op.writes}) std::ranges::replace(*operands, from, to);
  }
}

class Ulysses {
 public:
  /// Ranks along `axis` exchange heads.
  Ulysses(Draft& draft, UnitTemplate& layer, std::string_view axis)
      : draft_(draft),
        layer_(layer),
        axis_(draft.plan.mesh.axis(axis)),
        ranks_(draft.plan.mesh.size(axis)),
        comm_(draft.comm(axis == "cp" ? "cp" : "cp.heads", AxisSet::of(axis_))),
        label_(axis == "cp" ? "attn.heads" : "attn.part") {}

  void run() {
    const Attention core = std::get<Attention>(std::get<Op>(layer_.forward.segment.steps[core_of(layer_.forward)]).work);
    copies_ = core.kv_heads >= ranks_ ? 1 : ranks_ / core.kv_heads;
    kv_heads_ = core.kv_heads;
    head_dim_ = core.head_dim;
    const int64_t heads = core.heads / ranks_, kv_heads = std::max(core.kv_heads / ranks_, 1);
    const int64_t rows = heads * core.head_dim + kv_heads * (core.head_dim + value_dim_of(core)), out = heads * value_dim_of(core);
    forward(rows, out);
    backward(rows, out);
    for (DraftSegment* segment : {&layer_.forward, &layer_.backward}) {
      Op& op = std::get<Op>(segment->segment.steps[core_of(*segment)]);
      Attention& part = std::get<Attention>(op.work);
      part.heads = core.heads / ranks_;
      part.kv_heads = std::max(core.kv_heads / ranks_, 1);
      op.strategy = kContextParallelName;
    }
  }

 private:
  /// A slot that gets the type of whole sequences of some heads, and a new one for what it was: of some tokens, and all heads.
  struct Both {
    SlotId heads, tokens;
  };

  Both part(DraftSegment& segment, const std::string& name, int64_t width, bool keep) {
    const SlotId heads = segment.find(name);
    const SlotUse use = segment.uses[heads.index()];
    const Type by_tokens = segment.slot(heads).type;
    const SlotId tokens = segment.add(name + ".tokens", by_tokens, keep ? use.use : Use::kLocal,
                                      keep ? segment.slot(heads).cls : BufferClass::kTemporary);
    retarget(segment, heads, tokens);
    Type& type = segment.slot(heads).type;
    type.shape = {by_tokens.shape[0], by_tokens.shape[1] * ranks_, width};
    type = placed(std::move(type), axis_, Placement::shard(2));
    return {heads, tokens};
  }

  /// The statistics of whole sequences of some heads.
  void part_statistics(DraftSegment& segment) {
    Type& lse = segment.slot(segment.find("lse")).type;
    lse.shape = {lse.shape[0], lse.shape[1] / ranks_, lse.shape[2] * ranks_};
    lse = placed(std::move(lse), axis_, Placement::shard(1));
  }

  /// The ops between `both`, from tokens to heads or back, through parts that are sent and parts that came.
  std::vector<Step> exchange(DraftSegment& segment, const Both& both, const std::string& name, const std::string& label,
                             bool to_heads, int copies) {
    const Type &heads = segment.slot(both.heads).type, &tokens = segment.slot(both.tokens).type;
    const int64_t width = heads.shape[2];
    const Type of_tokens = in_parts(tokens, ranks_, tokens.shape[1], width, AxisSet::of(axis_), Placement::shard(1)),
               of_heads = in_parts(tokens, 1, heads.shape[1], width, AxisSet::of(axis_), Placement::shard(0));
    const SlotId by_tokens = segment.add(name + (to_heads ? ".sent" : ".came"), of_tokens, Use::kLocal, BufferClass::kTemporary),
                 by_heads = segment.add(name + (to_heads ? ".came" : ".sent"), of_heads, Use::kLocal, BufferClass::kTemporary);
    Regroup all{.parts = ranks_, .copies = copies};
    if (copies > 1) all.kv_heads = kv_heads_, all.head_dim = head_dim_;
    Regroup own{.parts = ranks_};
    (to_heads ? own : all).join = true;
    const Collective turn{CollectiveKind::kAllToAll, ReduceOp::kSum, comm_, draft_.algorithm()};
    std::vector<Step> steps;
    const auto op = [&](Work work, SlotId from, SlotId to, std::string_view what) {
      Op o;
      o.work = std::move(work);
      o.reads = {from};
      o.writes = {to};
      o.label = label + std::string(what);
      o.strategy = kContextParallelName;
      steps.emplace_back(std::move(o));
    };
    if (to_heads) {
      op(all, both.tokens, by_tokens, ".split");
      op(turn, by_tokens, by_heads, "");
      op(own, by_heads, both.heads, ".join");
    } else {
      op(own, both.heads, by_heads, ".split");
      op(turn, by_heads, by_tokens, "");
      op(all, by_tokens, both.tokens, ".join");
    }
    return steps;
  }

  /// Puts steps around the attention core.
  static void surround(DraftSegment& segment, std::vector<Step> before, std::vector<Step> after) {
    auto& steps = segment.segment.steps;
    const auto core = static_cast<std::ptrdiff_t>(core_of(segment));
    steps.insert(steps.begin() + core + 1, after.begin(), after.end());
    steps.insert(steps.begin() + core, before.begin(), before.end());
  }

  void forward(int64_t qkv_width, int64_t o_width) {
    DraftSegment& segment = layer_.forward;
    const Both qkv = part(segment, "qkv", qkv_width, false), o = part(segment, "o", o_width, true);
    part_statistics(segment);
    std::vector<Step> before = exchange(segment, qkv, "qkv", label_, true, copies_);
    surround(segment, std::move(before), exchange(segment, o, "o", "attn.tokens", false, 1));
  }

  void backward(int64_t qkv_width, int64_t o_width) {
    DraftSegment& segment = layer_.backward;
    Type& qkv = segment.slot(segment.find("qkv")).type;
    qkv = layer_.forward.slot(layer_.forward.find("qkv")).type;
    part(segment, "o", o_width, true);  // the core reads that of its heads, the projection that of its tokens
    part_statistics(segment);
    const Both d_o = part(segment, "d.o", o_width, false), d_qkv = part(segment, "d.qkv", qkv_width, false);
    std::vector<Step> before = exchange(segment, d_o, "d.o", "attn.tokens", true, 1);
    surround(segment, std::move(before), exchange(segment, d_qkv, "d.qkv", label_, false, copies_));
  }

  Draft& draft_;
  UnitTemplate& layer_;
  int axis_;
  int ranks_;
  CommId comm_;
  std::string label_;  ///< of the exchange of q, k and v; `Blocks` has one of "attn.heads"
  int copies_ = 1, kv_heads_ = 0, head_dim_ = 0;
};

/// Attention in blocks: queries of the rank's tokens, keys of one part of the sequence after another, or of the whole.
class Blocks {
 public:
  Blocks(Draft& draft, UnitTemplate& layer)
      : draft_(draft),
        layer_(layer),
        kind_(draft.config.layout.cp_kind),
        axis_(draft.plan.mesh.axis("cp")),
        ranks_(draft.plan.mesh.size("cp")),
        canonical_(draft.config.canonical) {}

  void run() {
    core_ = std::get<Attention>(std::get<Op>(layer_.forward.segment.steps[core_of(layer_.forward)]).work);
    const bool gathers = kind_ == ContextKind::kAllGather;
    for (const bool forward : {true, false}) {
      segment_ = forward ? &layer_.forward : &layer_.backward;
      split_rows(forward);
      const size_t core = core_of(*segment_);
      const Op op = std::get<Op>(segment_->segment.steps[core]);
      steps_.clear();
      if (forward)
        gathers ? gathered_forward(op) : ring_forward(op);
      else
        gathers ? gathered_backward(op) : ring_backward(op);
      auto& steps = segment_->segment.steps;
      const auto at = steps.erase(steps.begin() + static_cast<std::ptrdiff_t>(core));
      steps.insert(at, steps_.begin(), steps_.end());
    }
  }

 private:
  // ---- slots

  int64_t queries() const { return int64_t{core_.heads} * core_.head_dim; }
  /// Rows of o, of keys and values, and of the gradients of these by query head.
  int64_t outs() const { return int64_t{core_.heads} * value_dim_of(core_); }
  int64_t keys() const { return int64_t{core_.kv_heads} * (core_.head_dim + value_dim_of(core_)); }
  int64_t keys_by_head() const { return int64_t{core_.heads} * (core_.head_dim + value_dim_of(core_)); }

  SlotId local(const std::string& name, Type type) {
    return segment_->add(name, std::move(type), Use::kLocal, BufferClass::kTemporary);
  }
  Type rows(int64_t width) const {
    Type type = segment_->slot(segment_->find("q")).type;
    type.shape[2] = width;
    return type;
  }
  static Type wide(Type type) {
    type.dtype = DType::f32;
    return type;
  }
  /// A block of another rank.
  Type travelling(Type type) const { return placed(std::move(type), axis_, Placement::local()); }
  /// Rows of all tokens.
  Type whole(Type type, Placement along) const {
    type.shape[1] *= ranks_;
    return placed(std::move(type), axis_, along);
  }
  static std::string numbered(std::string_view name, int n) { return std::string(name) + "." + std::to_string(n); }

  /// What was kept of q, k and v in one tensor is kept in two: "q" and "kv".
  void split_rows(bool forward) {
    const SlotId kept = segment_->find("qkv");
    const Type qkv = segment_->slot(kept).type;
    if (forward) {
      segment_->slot(kept).name = "q";
      retarget(*segment_, kept, local("qkv", qkv));
    } else {
      segment_->slot(kept).name = "q";
    }
    segment_->slot(kept).type.shape[2] = queries();
    Type kv = qkv;
    kv.shape[2] = keys();
    segment_->add("kv", std::move(kv), segment_->uses[kept.index()].use, segment_->slot(kept).cls);
  }

  // ---- ops

  void op(Work work, std::vector<SlotId> reads, std::vector<SlotId> writes, std::string label, StreamId stream = StreamId(0)) {
    steps_.emplace_back(
        make_op(std::move(work), std::move(reads), std::move(writes), std::move(label), kContextParallelName, stream));
  }

  void split(SlotId qkv, SlotId q, SlotId kv) {
    op(SplitHeads{Phase::kF, core_.heads, core_.kv_heads, core_.head_dim, core_.v_dim}, {qkv}, {q, kv}, "attn.heads");
  }
  void join(SlotId dq, SlotId dkv, SlotId dqkv) {
    op(SplitHeads{Phase::kI, core_.heads, core_.kv_heads, core_.head_dim, core_.v_dim}, {dq, dkv}, {dqkv}, "attn.heads");
  }
  AttentionBlock block(Phase phase, int turn = 0) const {
    return {.phase = phase,
            .heads = core_.heads,
            .kv_heads = core_.kv_heads,
            .head_dim = core_.head_dim,
            .turn = turn,
            .packed = core_.packed,
            .document = core_.document,
            .v_dim = core_.v_dim,
            .window = core_.window};
  }
  AttentionMerge merge(Phase phase, int step, bool keys = false) const {
    return {phase, core_.heads, core_.kv_heads, core_.head_dim, step, keys, core_.v_dim};
  }

  /// Where blocks are added up: the layer's "o", or, where that is narrower, an f32 tensor that is rounded to it once.
  SlotId output() {
    const SlotId o = segment_->find("o");
    return segment_->slot(o).type.dtype == DType::f32 ? o : local("o.wide", wide(segment_->slot(o).type));
  }
  void round(SlotId from) {
    const SlotId o = segment_->find("o");
    if (from != o) op(Copy{}, {from}, {o}, std::string(kCore));
  }

  /// The operands of a block: positions in packed documents are the core's last operand, and of whole sequences.
  std::vector<SlotId> with_positions(std::vector<SlotId> reads, const Op& core) const {
    if (core_.packed) reads.push_back(core.reads.back());
    return reads;
  }

  // ---- keys and values of all tokens

  /// Backward gathers again: where recompute has done so already, that op is left out by its label.
  SlotId gather(const std::string& again = "") {
    const SlotId kv = segment_->find("kv"), all = local("kv.all", whole(segment_->slot(kv).type, Placement::replicate()));
    op(Collective{CollectiveKind::kAllGather, ReduceOp::kSum, draft_.comm("cp", AxisSet::of(axis_)), draft_.algorithm()}, {kv},
       {all}, "attn.keys" + again);
    return all;
  }

  void gathered_forward(const Op& core) {
    split(segment_->find("qkv"), segment_->find("q"), segment_->find("kv"));
    const SlotId all = gather(), o = output();
    op(block(Phase::kF), with_positions({segment_->find("q"), all}, core), {o, core.writes[1]}, std::string(kCore));
    round(o);
  }

  void gathered_backward(const Op& core) {
    const SlotId all = gather(".again"), dq = local("d.q", rows(queries())), dkv = local("d.kv", rows(keys()));
    const Type part = canonical_ ? wide(rows(keys_by_head())) : rows(keys());  // by query head
    const SlotId dall = local("d.kv.all", whole(part, Placement::partial()));
    AttentionBlock back = block(Phase::kI);
    back.partial = canonical_;
    op(back, with_positions({core.reads[0], core.reads[1], core.reads[2], segment_->find("q"), all}, core), {dq, dall},
       std::string(kCore));
    const SlotId own = canonical_ ? local("d.kv.heads", part) : dkv;
    // Direct: other algorithms sum in the source, of which the result would have to be a view, and a part of several sequences is none.
    op(Collective{CollectiveKind::kReduceScatter, ReduceOp::kSum, draft_.comm("cp", AxisSet::of(axis_)), Algorithm::kDirect},
       {dall}, {own}, "attn.d.keys");
    if (canonical_) op(merge(Phase::kI, 1, true), {own}, {dkv}, std::string(kCore) + ".keys");
    join(dq, dkv, core.writes[0]);
  }

  // ---- keys and values around a ring

  /// Sends `from` to the rank `hop` further along, and takes what comes from the other side into `to`. The receive comes first: a free
  /// behind the send waits for the send, which waits for the peer's receive.
  void pass(SlotId from, SlotId to, const std::string& label, std::string_view comm, int hop, std::string_view streams) {
    const CommId on = draft_.comm(comm, AxisSet::of(axis_));
    const std::string prefix(streams);
    const StreamId out = draft_.stream(prefix + ".out"), in = draft_.stream(prefix + ".in");
    op(Recv{on, -hop, true}, {}, {to}, "receive." + label, in);
    op(Send{on, hop, true}, {from}, {}, "send." + label, out);
  }

  /// One of two buffers through which blocks pass by turns. Each lives until the last has passed: what is received into it waits for
  /// what is sent from it, and no free makes the compute stream wait.
  SlotId buffer(const std::string& name, const Type& type, int turn) {
    const std::string which = numbered(name, turn % 2);
    const auto known = segment_->find_if(which);
    return known ? *known : local(which, type);
  }

  /// The block of keys and values after `block`, which leaves for the next rank: it travels while the block at hand is worked on.
  SlotId next(SlotId block, int turn, const std::string& name) {
    const SlotId kv = buffer(name, travelling(segment_->slot(segment_->find("kv")).type), turn);
    pass(block, kv, numbered("attn.kv", turn), "cp.kv", 1, "cp");
    return kv;
  }

  /// Canonical blocks are parts, and their merge is the core; others add to the core's result.
  std::string label_of(int turn) const {
    if (canonical_) return numbered("attn.block", turn);
    return turn == 0 ? std::string(kCore) : numbered(kCore, turn);
  }

  void ring_forward(const Op& core) {
    const SlotId q = segment_->find("q"), own = segment_->find("kv"), o = output(), lse = core.writes[1];
    split(segment_->find("qkv"), q, own);
    Type sums = wide(segment_->slot(lse).type);
    sums.shape = {sums.shape[0], sums.shape[1], sums.shape[2], 2};
    std::vector<SlotId> parts;
    SlotId kv = own;
    for (int turn = 0; turn < ranks_; ++turn) {
      const SlotId after = turn + 1 < ranks_ ? next(kv, turn + 1, "kv") : SlotId();
      AttentionBlock work = block(Phase::kF, -turn);
      if (canonical_) {
        work.partial = true;
        const SlotId part = local(numbered("o.part", turn), wide(rows(outs()))), sum = local(numbered("o.sums", turn), sums);
        parts.insert(parts.end(), {part, sum});
        op(work, with_positions({q, kv}, core), {part, sum}, label_of(turn));
      } else {
        work.carry = turn > 0;
        op(work, with_positions(work.carry ? std::vector{q, kv, o, lse} : std::vector{q, kv}, core), {o, lse}, label_of(turn));
      }
      kv = after;
    }
    if (canonical_) op(merge(Phase::kF, -1), parts, {o, lse}, std::string(kCore));
    round(o);
  }

  void ring_backward(const Op& core) {
    const SlotId q = segment_->find("q"), own = segment_->find("kv");
    const std::vector<SlotId> saved{core.reads[0], core.reads[1], core.reads[2], q};
    const SlotId dq = local("d.q", wide(rows(queries()))), dkv = local("d.kv", wide(rows(keys())));  // sums of blocks
    SlotId kv = own, arriving;
    std::vector<SlotId> dqs, dkvs;
    for (int turn = 0; turn < ranks_; ++turn) {
      const SlotId after = turn + 1 < ranks_ ? next(kv, turn + 1, "kv.back") : SlotId();
      AttentionBlock work = block(Phase::kI, -turn);
      std::vector<SlotId> reads = saved;
      reads.push_back(kv);
      if (canonical_) {
        work.partial = true;
        const Type by_head = wide(rows(keys_by_head()));
        dqs.push_back(local(numbered("d.q.part", turn), wide(rows(queries()))));
        const SlotId made = turn == 0 ? local("d.kv.own", by_head) : buffer("d.kv.part", travelling(by_head), turn);
        op(work, with_positions(std::move(reads), core), {dqs.back(), made}, label_of(turn));
        dkvs.push_back(turn == 0 ? made : local(numbered("d.kv.home", turn), by_head));
        if (turn > 0) pass(made, dkvs.back(), numbered("attn.d.kv", turn), "cp.d.kv", -turn, "cp.d");
      } else {
        work.carry = work.carry_kv = turn > 0;
        if (turn > 0) reads.insert(reads.end(), {dq, arriving});
        const SlotId made = turn > 0 ? arriving : dkv;  // which leaves, and comes home complete
        op(work, with_positions(std::move(reads), core), {dq, made}, label_of(turn));
        arriving = turn + 1 < ranks_ ? buffer("d.kv.back", travelling(wide(rows(keys()))), turn + 1) : dkv;
        pass(made, arriving, numbered("attn.d.kv", turn + 1), "cp.d.kv", 1, "cp.d");
      }
      kv = after;
    }
    if (canonical_) {
      op(merge(Phase::kI, -1), dqs, {dq}, std::string(kCore) + ".queries");
      op(merge(Phase::kI, 1, true), dkvs, {dkv}, std::string(kCore) + ".keys");
    }
    join(dq, dkv, core.writes[0]);
  }

  Draft& draft_;
  UnitTemplate& layer_;
  const ContextKind kind_;
  int axis_;
  int ranks_;
  const bool canonical_;
  Attention core_;
  DraftSegment* segment_ = nullptr;
  std::vector<Step> steps_;
};

}  // namespace

void context_parallel(Draft& draft) {
  draft.plan.token_order = token_order_of(draft.config.layout);
  const ContextKind kind = draft.config.layout.cp_kind;
  for (const UnitKind layers : draft.layer_kinds()) {
    UnitTemplate& layer = draft.of(layers);
    if (kind == ContextKind::kUlysses) Ulysses(draft, layer, "cp").run();
    if (kind == ContextKind::kUsp) Ulysses(draft, layer, kHeadsAxis).run();
    if (kind != ContextKind::kUlysses) Blocks(draft, layer).run();
  }
  if (draft.config.model.is_mixture()) {
    share_room(draft, routed_axes(draft), kContextParallelName);
    sum_loads(draft, routed_axes(draft), kContextParallelName);
  }
}

}  // namespace shardlab::strategies
