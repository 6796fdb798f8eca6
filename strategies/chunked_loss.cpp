// Head and loss in pieces: the logits of a micro-batch are made, judged and used piece by piece, and are never whole.
//
// A piece is some of the micro-batch's sequences, or an equal part of one. Head, loss and the gradients of both stand one after another for
// each piece, all in backward: the head's forward ends with the norm, and a piece's logits live from its product to the gradient of the
// weight. Nothing is computed twice. Pieces of the normed input, of its gradient and of the targets are views of the whole.
//
// Parts of a sequence add up to the sums of one piece by the tree of docs/canonical-order.md: the losses of a sequence's parts always,
// gradients of the weight in canonical mode, in copies of their own. In fast mode they are added in place.
//
// Shapes   logits[b s/k, V] in place of [b,s,V]
// Adds     no bytes: under vocabulary-parallel loss k times as many messages of 1/k of the size
// Memory   logits 1/k, none between forward and backward; canonical: floor(log2 k) copies of the head's gradient while the head goes back.
//          A schedule that puts gradients of weights off keeps all pieces until then
// Refuses  pieces that are no memory without a gap; canonical: pieces that are no whole leaves; a secondary shard (ZeRO++ hpZ), which
//          copies what forward gathers
// Paper    Hsu et al., "Liger Kernel" (2024); Luo et al., "Mini-Sequence Transformer" (2024)
#include "strategies/chunked_loss.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "strategies/accumulation.h"

namespace shardlab::strategies {
namespace {

constexpr std::string_view kChunkedLossName = "chunked-loss";

bool is_head(const Op& op, Phase phase) {
  return std::holds_alternative<Linear>(op.work) && op.label == "head" && phase_of(op.work) == phase;
}

std::string numbered(std::string_view name, int i) { return std::string(name) + "." + std::to_string(i); }

/// What a segment does: its ops, which a pass may give to another segment.
std::vector<Op> take_ops(DraftSegment& segment) {
  std::vector<Op> ops;
  for (Step& step : std::exchange(segment.segment.steps, {})) ops.push_back(std::move(std::get<Op>(step)));
  return ops;
}

std::vector<bool> touched_by(const DraftSegment& segment, const std::vector<Op>& ops) {
  std::vector<bool> touched(segment.uses.size());
  for (const Op& op : ops)
    for (const auto* operands : {&op.reads, &op.writes})
      for (const SlotId slot : *operands) {
        touched[slot.index()] = true;
        if (const auto& view = segment.slot(slot).view) touched[static_cast<size_t>(view->base)] = true;
      }
  return touched;
}

/// Gives up slots that the segment's ops used `before` and use no longer.
void drop_slots(DraftSegment& segment, const std::vector<bool>& before) {
  std::vector<Op> ops = take_ops(segment);
  const std::vector<bool> now = touched_by(segment, ops);
  DraftSegment kept;
  kept.segment.name = segment.segment.name;
  std::vector<SlotId> moved(segment.uses.size());
  for (size_t s = 0; s < segment.uses.size(); ++s) {
    if (s < before.size() && before[s] && !now[s]) continue;
    Slot slot = segment.segment.slots[s];
    if (slot.view) slot.view->base = moved[static_cast<size_t>(slot.view->base)].value;
    moved[s] = SlotId(static_cast<int32_t>(kept.uses.size()));
    kept.segment.slots.push_back(std::move(slot));
    kept.uses.push_back(segment.uses[s]);
  }
  for (Op& op : ops) {
    for (auto* operands : {&op.reads, &op.writes})
      for (SlotId& slot : *operands) slot = moved[slot.index()];
    kept.segment.steps.emplace_back(std::move(op));
  }
  segment = std::move(kept);
}

class ChunkedLoss {
 public:
  explicit ChunkedLoss(Draft& draft)
      : draft_(draft),
        forward_(draft.of(UnitKind::kHead).forward),
        backward_(draft.of(UnitKind::kHead).backward),
        to_(draft.training ? backward_ : forward_),
        pieces_(draft.config.layout.loss_chunks),
        of_sequence_(std::max<int>(1, pieces_ / static_cast<int>(draft.config.train.micro_batch))) {}

  void run() {
    const std::vector<Op> ahead = take_ops(forward_), back = draft_.training ? take_ops(backward_) : std::vector<Op>();
    const std::vector<bool> of_forward = touched_by(forward_, ahead), of_backward = touched_by(backward_, back);
    split(ahead);
    for (const Op& op : before_)
      if (!draft_.training || !is_input_of_head(op)) forward_.segment.steps.emplace_back(op);
    const auto first = std::ranges::find_if(back, [&](const Op& op) { return is_head(op, Phase::kI); });
    for (auto op = back.begin(); op != first; ++op) put(*op);
    for (const Op& op : load_) put_moved(op);
    for (int i = 0; i < pieces_; ++i) put_piece(i, back);
    for (auto op = first; op != back.end(); ++op)
      if (!is_head(*op, Phase::kI) && !is_head(*op, Phase::kW)) put(*op);
    drop_slots(forward_, of_forward);
    if (draft_.training) drop_slots(backward_, of_backward);
  }

 private:
  /// Forward up to the head's product; the batch's targets; the product, and the loss.
  void split(const std::vector<Op>& ops) {
    bool judged = false;
    for (const Op& op : ops) {
      judged = judged || is_head(op, Phase::kF);
      (!judged ? before_ : std::holds_alternative<LoadBatch>(op.work) ? load_ : loss_).push_back(op);
    }
    SHARDLAB_CHECK(!loss_.empty(), "the head has no product");
    input_ = loss_.front().reads[0];
  }
  /// A gather of what only the head's product reads (sequence parallelism): backward gathers it too.
  bool is_input_of_head(const Op& op) const {
    return std::holds_alternative<Collective>(op.work) && op.writes[0] == input_ &&
           forward_.uses[input_.index()].use == Use::kLocal;
  }

  void put(Op op) { to_.segment.steps.emplace_back(std::move(op)); }
  void put_moved(Op op) {
    for (auto* operands : {&op.reads, &op.writes})
      for (SlotId& slot : *operands) slot = moved(slot);
    put(std::move(op));
  }
  /// A slot of forward where the loss is now.
  SlotId moved(SlotId slot) {
    if (!draft_.training) return slot;
    const Slot& s = forward_.slot(slot);
    if (const auto found = to_.find_if(s.name)) return *found;
    const SlotUse& use = forward_.uses[slot.index()];
    return to_.add(s.name, s.type, use.use, s.cls, use.parameter);
  }

  /// The type of a piece of a tensor of all tokens, [b,s,..].
  Type piece_of(Type type) const {
    if (of_sequence_ == 1) {
      type.shape[0] /= pieces_;
    } else {
      type.shape[0] = 1;
      type.shape[1] /= of_sequence_;
    }
    return type;
  }
  /// Piece i of a tensor that is there as a whole, in place.
  SlotId part(SlotId whole, int i) {
    const std::string name = numbered(to_.slot(whole).name, i);
    if (const auto found = to_.find_if(name)) return *found;
    const auto base = to_.slot(whole).view;
    const SlotId view = to_.add_view(name, base ? SlotId(base->base) : whole, piece_of(to_.slot(whole).type));
    to_.slot(view).view->offset = (base ? base->offset : 0) + i * to_.slot(view).type.shape.elements();
    return view;
  }
  /// Where piece i keeps what a slot of forward holds of all pieces.
  SlotId own(SlotId slot, int i) {
    const Slot s = forward_.slot(slot);
    const std::string name = numbered(s.name, i);
    if (const auto found = to_.find_if(name)) return *found;
    if (s.view) return to_.add_view(name, own(SlotId(s.view->base), i), piece_of(s.type));
    return to_.add(name, piece_of(s.type), Use::kLocal, BufferClass::kTemporary);
  }

  void put_piece(int i, const std::vector<Op>& back) {
    std::vector<bool> made(forward_.uses.size());  // by the piece itself
    for (const Op& op : loss_)
      for (const SlotId slot : op.writes) made[slot.index()] = true;
    for (Op op : loss_) {
      for (SlotId& read : op.reads) read = operand(read, i, made);
      for (SlotId& write : op.writes) write = forward_.uses[write.index()].use == Use::kLoss ? loss_of(write, i) : own(write, i);
      put_numbered(std::move(op), i);
    }
    add_losses(i);
    for (const Phase phase : {Phase::kI, Phase::kW})
      for (const Op& op : back)
        if (is_head(op, phase)) put_back(op, phase, i);
  }
  SlotId operand(SlotId slot, int i, const std::vector<bool>& made) {
    const auto& view = forward_.slot(slot).view;
    if (made[slot.index()] || (view && made[static_cast<size_t>(view->base)])) return own(slot, i);
    const bool of_tokens = slot == input_ || std::ranges::any_of(load_, [&](const Op& op) { return op.writes[0] == slot; });
    return of_tokens ? part(moved(slot), i) : moved(slot);
  }

  void put_back(Op op, Phase phase, int i) {
    const size_t logits = phase == Phase::kI ? 0 : 1;
    op.reads[logits] = to_.find(numbered(to_.slot(op.reads[logits]).name, i));
    if (phase == Phase::kI) {
      op.writes[0] = part(op.writes[0], i);
      return put_numbered(std::move(op), i);
    }
    op.reads[0] = part(op.reads[0], i);
    if (!draft_.config.canonical) {
      std::get<Linear>(op.work).accumulate = i > 0;
      if (i > 0) op.reads.push_back(op.writes[0]);
      return put_numbered(std::move(op), i);
    }
    const SlotId gradient = op.writes[0];
    const auto copy = [&](int index) { return copy_of(gradient, index); };
    const Carry carry = carry_of(pieces_, i);
    op.writes[0] = copy(carry.written);
    put_numbered(std::move(op), i);
    for (const auto& [to, from] : carry.added) put_sum("head.sum", i, copy(to), copy(from));
  }

  void put_numbered(Op op, int i) {
    if (auto* linear = std::get_if<Linear>(&op.work)) linear->chunks = of_sequence_;
    if (auto* loss = std::get_if<CrossEntropy>(&op.work)) loss->chunks = of_sequence_;
    op.label = numbered(op.label, i);
    op.strategy = kChunkedLossName;
    put(std::move(op));
  }

  // ---- sums over the parts of a sequence

  static Carry carry_of(int parts, int part) {
    std::vector<int> order(static_cast<size_t>(parts));
    std::iota(order.begin(), order.end(), 0);
    return carries(order, parts, true)[static_cast<size_t>(part)];
  }
  /// Copy 0 is the sum itself.
  SlotId copy_of(SlotId sum, int index) {
    if (index == 0) return sum;
    const std::string name = to_.slot(sum).name + ".copy" + std::to_string(index);
    if (const auto found = to_.find_if(name)) return *found;
    return to_.add(name, to_.slot(sum).type, Use::kLocal, BufferClass::kTemporary);
  }
  /// The losses of the sequences of piece i: some of all, or one that its parts add up to.
  SlotId sequences_of(int i) {
    const SlotId all = to_.find("loss");
    const int at = of_sequence_ == 1 ? i : i / of_sequence_;
    const std::string name = numbered("loss.of", at);
    if (const auto found = to_.find_if(name)) return *found;
    Type type = to_.slot(all).type;
    type.shape[0] = of_sequence_ == 1 ? type.shape[0] / pieces_ : 1;
    const SlotId view = to_.add_view(name, all, type);
    to_.slot(view).view->offset = at * type.shape[0];
    return view;
  }
  SlotId loss_of(SlotId slot, int i) {
    moved(slot);
    const SlotId sequences = sequences_of(i);
    return of_sequence_ == 1 ? sequences : copy_of(sequences, carry_of(of_sequence_, i % of_sequence_).written);
  }
  void add_losses(int i) {
    if (of_sequence_ == 1) return;
    const SlotId sequence = sequences_of(i);
    for (const auto& [to, from] : carry_of(of_sequence_, i % of_sequence_).added)
      put_sum("loss.sum", i, copy_of(sequence, to), copy_of(sequence, from));
  }
  void put_sum(std::string_view label, int i, SlotId to, SlotId from) {
    Op op;
    op.work = Add{};
    op.reads = {to, from};
    op.writes = {to};
    op.label = numbered(label, i) + "." + to_.slot(from).name.substr(to_.slot(from).name.rfind('.') + 1);
    op.strategy = kChunkedLossName;
    put(std::move(op));
  }

  Draft& draft_;
  DraftSegment& forward_;
  DraftSegment& backward_;
  DraftSegment& to_;  ///< where head and loss are
  const int pieces_, of_sequence_;
  std::vector<Op> before_, load_, loss_;  ///< of forward
  SlotId input_;                          ///< of the head's product
};

}  // namespace

void chunk_loss(Draft& draft) { ChunkedLoss(draft).run(); }

}  // namespace shardlab::strategies
