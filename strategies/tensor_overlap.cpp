// Collective matmul (asynchronous tensor parallelism): the products of sequence parallelism go strip by strip, each beside the message of
// another. A strip is one rank's tokens of every sequence.
//
//   gather and multiply   strips go once around the ring of tp's ranks. A rank multiplies the strip at hand, its own first, into the rows of
//                         the result where its tokens are, while the next one arrives and the one at hand leaves
//   multiply and scatter  a rank multiplies the strips of the other ranks, and each result leaves for its owner while the next is made;
//                         its own comes last. The owner adds up one summand of each rank, in the order of the ranks, before the first
//                         op that reads the sum: in backward the weight's gradient is made in between
//
// The first is done before the column-parallel products of forward and for the input's gradient of row-parallel ones, the second for the
// other two. What a weight's gradient reads of all tokens is gathered as without (the input of a column-parallel product), or put
// together of the strips that came (the gradient behind a row-parallel product). Embedding and head are as without.
//
// Summands go to their owner directly, and are not added up on their way around a ring: only so is their sum the tree of
// docs/canonical-order.md, and each is rounded once. A message of either kind is a strip, so that as many bytes travel.
//
// Shapes   strip[b,s/t,w]; a product in strips takes a strip of its input, or makes one of its result, for each sequence by itself
// Adds     in place of a gather or a scatter of b*s*h t-1 messages of b*s*h/t from each rank: the same bytes. Under full recompute 2 gathers
//          of b*s*h more: the repeated products gather no input that the weights' gradients could take
// Memory   gather and multiply: two strips in place of the whole input; t-1 strips beside the whole where a weight's gradient takes it.
//          multiply and scatter: t+2 strips in place of a whole
// Refuses  tensor parallelism without sequence parallelism, 8-bit factors, more than 64 ranks, NCCL
// Paper    Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models" (2023); PyTorch's
//          asynchronous tensor parallelism (2024)
#include "strategies/tensor_overlap.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "strategies/draft.h"

namespace shardlab::strategies {
namespace {

constexpr std::string_view kTensorOverlapName = "tensor-overlap";

class InStrips {
 public:
  InStrips(Draft& draft, DraftSegment& segment)
      : draft_(draft), segment_(segment), axis_(draft.plan.mesh.axis("tp")), size_(draft.config.layout.tp) {}

  void run() {
    for (Step& step : std::exchange(segment_.segment.steps, {})) old_.push_back(std::move(std::get<Op>(step)));
    for (size_t i = 0; i < old_.size(); ++i) {
      place_sums(old_[i]);
      if (const Op* product = product_of_gather(i)) {
        gathered_ = &old_[i];
        gather_for_ = product;
      } else if (&old_[i] == gather_for_) {
        multiply_gathered(*gathered_, old_[i]);
      } else if (i + 1 < old_.size() && is_product(old_[i]) && is(old_[i + 1], CollectiveKind::kReduceScatter)) {
        multiply_scattered(old_[i], old_[i + 1]);
        ++i;
      } else {
        steps_.emplace_back(old_[i]);
      }
    }
    SHARDLAB_CHECK(sums_.empty(), "{} reads no sum of {}", segment_.segment.name, sums_.front().label);
    segment_.segment.steps = std::move(steps_);
  }

 private:
  static bool is_product(const Op& op) { return std::holds_alternative<Linear>(op.work) && phase_of(op.work) != Phase::kW; }
  static bool is(const Op& op, CollectiveKind kind) {
    const auto* c = std::get_if<Collective>(&op.work);
    return c != nullptr && c->kind == kind;
  }
  static bool reads(const Op& op, SlotId slot) { return std::ranges::find(op.reads, slot) != op.reads.end(); }

  /// The product that takes what op `i` gathers; null where it gathers nothing, or for gradients of weights alone.
  const Op* product_of_gather(size_t i) const {
    if (!is(old_[i], CollectiveKind::kAllGather)) return nullptr;
    const auto found = std::find_if(old_.begin() + static_cast<std::ptrdiff_t>(i), old_.end(),
                                    [&](const Op& op) { return is_product(op) && op.reads[0] == old_[i].writes[0]; });
    return found == old_.end() ? nullptr : &*found;
  }
  bool is_read_by_weight(SlotId all) const {
    return std::ranges::any_of(old_, [&](const Op& op) { return phase_of(op.work) == Phase::kW && reads(op, all); });
  }

  void op(Work work, std::vector<SlotId> reads, std::vector<SlotId> writes, std::string label, StreamId stream = StreamId(0)) {
    steps_.emplace_back(
        make_op(std::move(work), std::move(reads), std::move(writes), std::move(label), kTensorOverlapName, stream));
  }
  static std::string numbered(const std::string& name, int n) { return name + "." + std::to_string(n); }
  /// Of the first strip a product keeps its label, by which its gradients know it.
  static std::string label_of(const std::string& label, int turn) { return turn == 0 ? label : numbered(label, turn); }

  Type strip_of(const Type& own) const { return placed(own, axis_, Placement::local()); }
  SlotId local(const std::string& name, const Type& type) {
    const auto known = segment_.find_if(name);
    return known ? *known : segment_.add(name, type, Use::kLocal, BufferClass::kTemporary);
  }
  /// Gives a slot that is no longer what it was, nor used as that, another name and type.
  void become(SlotId slot, std::string name, Type type) {
    segment_.slot(slot).name = std::move(name);
    segment_.slot(slot).type = std::move(type);
  }

  /// Sends `from` to the rank `hop` further along, and takes what comes from the other side into `to`. The receive comes first: a free
  /// behind the send waits for the send, which waits for the peer's receive.
  void receive(std::string_view comm, int hop, SlotId to, const std::string& label) {
    op(Recv{draft_.comm(comm, AxisSet::of(axis_)), -hop, true}, {}, {to}, "receive." + label, draft_.stream("tp.in"));
  }
  void send(std::string_view comm, int hop, SlotId from, const std::string& label) {
    op(Send{draft_.comm(comm, AxisSet::of(axis_)), hop, true}, {from}, {}, "send." + label, draft_.stream("tp.out"));
  }

  Linear strip(const Op& product, int turn, bool carry) const {
    Linear w = std::get<Linear>(product.work);
    w.strips = size_;
    w.turn = -turn;
    w.carry = carry;
    return w;
  }

  void multiply_gathered(const Op& gather, const Op& product) {
    const SlotId own = gather.reads[0], all = gather.writes[0], result = product.writes[0];
    const std::string name = segment_.slot(own).name;
    const Type type = strip_of(segment_.slot(own).type);
    const bool keeps = is_read_by_weight(all);
    if (!keeps) become(all, name + ".strip.1", type);
    std::vector<SlotId> strips{own};
    for (int turn = 0; turn < size_; ++turn) {
      if (turn + 1 < size_) {
        // Where nobody needs them all, strips pass through two buffers by turns.
        const SlotId next = local(name + ".strip." + std::to_string(keeps ? turn + 1 : turn % 2 + 1), type);
        const std::string label = numbered(product.label + ".strip", turn + 1);
        receive("tp.strips", 1, next, label);
        send("tp.strips", 1, strips.back(), label);
        strips.push_back(next);
      }
      std::vector<SlotId> reads = product.reads;
      reads[0] = strips[static_cast<size_t>(turn)];
      if (turn > 0) reads.push_back(result);
      op(strip(product, turn, turn > 0), std::move(reads), {result}, label_of(product.label, turn));
    }
    if (keeps) op(Strips{.step = -1}, strips, {all}, product.label + ".strips");
  }

  void multiply_scattered(const Op& product, const Op& scatter) {
    const SlotId part = scatter.reads[0], result = scatter.writes[0];
    const std::string name = segment_.slot(result).name;
    const Type type = strip_of(segment_.slot(result).type);
    become(part, name + ".own", type);
    std::vector<SlotId> summands{part};
    for (int i = 1; i <= size_; ++i) {
      const int turn = i % size_;  // its own comes last
      const SlotId made = turn == 0 ? part : local(name + ".made." + std::to_string((turn - 1) % 2 + 1), type);
      const std::string label = numbered(product.label + ".summand", turn);
      if (turn != 0) {
        summands.push_back(local(numbered(name + ".summand", turn), type));
        receive("tp.summands", -turn, summands.back(), label);
      }
      op(strip(product, turn, false), product.reads, {made}, label_of(product.label, turn));
      if (turn != 0) send("tp.summands", -turn, made, label);
    }
    Op sum;
    sum.work = Strips{.step = 1, .sum = true};
    sum.reads = std::move(summands);
    sum.writes = {result};
    sum.label = product.label + ".sum";
    sum.strategy = kTensorOverlapName;
    sums_.push_back(std::move(sum));
  }

  /// Summands are added up before the first op that reads, or goes on with, their sum.
  void place_sums(const Op& next) {
    std::erase_if(sums_, [&](const Op& sum) {
      const auto uses = [&](SlotId slot) {
        const auto& view = segment_.slot(slot).view;
        return slot == sum.writes[0] || (view && view->base == sum.writes[0].value);
      };
      if (std::ranges::none_of(next.reads, uses) && std::ranges::none_of(next.writes, uses)) return false;
      steps_.emplace_back(sum);
      return true;
    });
  }

  Draft& draft_;
  DraftSegment& segment_;
  int axis_;
  int size_;
  std::vector<Op> old_;
  std::vector<Step> steps_;
  std::vector<Op> sums_;            ///< not yet placed
  const Op* gathered_ = nullptr;    ///< the gather that was left out last ...
  const Op* gather_for_ = nullptr;  ///< ... and the product for which
};

}  // namespace

void tensor_overlap(Draft& draft) {
  for (const UnitKind kind : draft.layer_kinds()) {
    UnitTemplate& layer = draft.of(kind);
    InStrips(draft, layer.forward).run();
    InStrips(draft, layer.backward).run();
  }
}

}  // namespace shardlab::strategies
