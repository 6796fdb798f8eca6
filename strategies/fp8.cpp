// fp8: the matrix products of a layer take factors of 8 bits, each rounded to e4m3 or e5m2 after it was divided by a scale.
// Products are added up in fp32 and rounded to bf16 once. All else stays as mixed precision has it: the embedding, the head, norms,
// the attention core, residuals and activations compute in bf16, parameters are bf16 with fp32 copies, their gradients fp32, and
// the gradient of a bias is a sum of what was not rounded to 8 bits.
//
// Three ways to choose scales, powers of two all (`fp8_scaling`):
//   current  one scale a tensor, for its largest size now: amax, scale, quantise are three ops. e4m3 forward, e5m2 for gradients.
//   delayed  one scale a tensor, for its largest size in the last 16 steps, margin 0: a factor is quantised at once, and its own
//            largest size is noted for the steps to come, over all micro-batches of the step. Before the first step scales
//            are 1. e4m3 forward, e5m2 for gradients. A validation step notes nothing.
//   block    one scale each 128 neighbours of a row of an activation or a gradient, and each 128 x 128 of a weight, for its
//            current largest size. e4m3 throughout. The sum over tokens takes factors with the scales of rows, as they are kept;
//            hardware whose scales must go along the sum quantises them again in columns.
//
// A tensor's scale is that of the whole. A slice of a matrix, of the hidden layer or of its gradient knows the largest size of the
// slice alone, so that the ranks of a tp group agree on the greatest; on dp ranks matrices are whole, also under ZeRO-3, which
// gathers 16 bits. A current scale of an activation is the micro-batch's on its rank: a layout with the same micro-batches has the
// same. A delayed one is for the global batch, so that ranks of dp and tp agree, once a step, on all sizes of a stage together; its
// history is state of the run, which checkpoints carry. Blocks of a slice are blocks of the whole (`check` sees to it).
//
// Backward reads what forward quantised: of a product's input 8 bits are kept, 16 where another op wants them (attention its own
// output). Weights are quantised in forward and again in backward, with the scale of the first time. So are inputs under recompute.
//
// Experts take blocks alone. A rank's experts have rows of other ranks: the largest size of all rows for an expert would be known when the
// rows have come, and a scale of the tensor is needed before, if the exchange is to move 8 bits. A block is of one row, and has the same scale
// wherever the row is. So rows, and their gradients, are rounded at home, and go to the experts with their scales ahead of them; rounded with
// the experts they would have the same bits and travel in 16. What comes back from the experts stays bf16: it is weighted and added up.
// Blocks of weights are of one expert's matrix, so that they do not depend on which experts a rank has. How many rows there are is known when
// a router has chosen: the kernel reads their counts, and rounds no others (DeepSeek-V3 pads each expert's rows to whole tiles instead).
// Routers, and what gates shared experts, keep 16 bits. An input that is gathered for them too is gathered once, in 16 bits, and rounded
// again in backward.
//
// Shapes   as without; scales [1], [b,s,ceil(columns/128)], [ceil(rows/128),ceil(columns/128)]; of rows of experts [1,r,ceil(width/128)],
//          of their weights [e,ceil(out/128),ceil(in/128)]
// Adds     current: per layer and micro-batch 8 all-reduces (maximum) of one f32 over tp (4 matrices, 2 inputs, 2 gradients)
//          delayed: per step and stage an all-reduce (maximum) of 12 f32 a layer over dp and tp
//          block: nothing. Of the four exchanges of rows of experts two move h + 4 ceil(h/128) bytes a row in place of 2 h, in two messages:
//          all four 6 1/16 h in place of 8 h
//          under sequence parallelism the gathered inputs and gradients of products travel in 8 bits, block scales beside them; with
//          current scaling 4 more all-reduces of one f32, over tp: those inputs and gradients are cut too
// Memory   of inputs of products b*s*(2h + f/t) less than in bf16, b*s*h/t more for attention's output; scales; delayed:
//          12*(16 + 2) f32 a layer. While it is used, one matrix in 8 bits. Of experts: rows that have come and rows between the products in
//          8 bits, (h + f)(1 + 1/32) bytes a row of the buffers in place of 2 (h + f)
// Refuses  shards that cut blocks; of experts scales that are not of blocks; back ends without kernels of it (`check`)
// Paper    Micikevicius et al., "FP8 Formats for Deep Learning" (2022); DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section
//          3.3; NVIDIA Transformer Engine's recipes of delayed and current scaling
#include "strategies/fp8.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "plan/named_kernels.h"
#include "plan/precision.h"
#include "strategies/draft.h"

namespace shardlab::strategies {
namespace {

constexpr std::string_view kFp8Name = "fp8";
constexpr int64_t kBlock = 128;
constexpr std::array<std::string_view, 4> kProducts{"attn.qkv", "attn.out", "mlp.up", "mlp.down"};

enum class Scaling : uint8_t { kCurrent, kDelayed, kBlock };

Scaling scaling_of(const Case& c) {
  if (c.train.fp8_scaling == Fp8Scaling::kBlock) return Scaling::kBlock;
  return c.train.fp8_scaling == Fp8Scaling::kDelayed ? Scaling::kDelayed : Scaling::kCurrent;
}

/// Axes along which a tensor may be cut: its largest size is one rank's there.
std::vector<int> cutting_axes(const Mesh& mesh) {
  std::vector<int> axes;
  for (const std::string_view name :
       {std::string_view("replica"), std::string_view("dp"), std::string_view("node"), std::string_view("tp"), kSlicesAxis})
    if (const auto axis = mesh.find(name); axis && mesh.size(name) > 1) axes.push_back(*axis);
  return axes;
}

/// One f32 a tensor of `n`, the same on every rank, or of each rank its own.
Type numbers(const Mesh& mesh, int64_t n, bool partial) {
  Type t;
  t.shape = {n};
  if (partial)
    for (const int axis : cutting_axes(mesh)) t = placed(t, axis, Placement::partial());
  return t;
}

/// A factor in 8 bits.
struct Factor {
  SlotId values, scales;
};

/// Rows of experts that a factor has: their counts, and how many are expected. Without counts: of no expert.
struct Rows {
  SlotId counts;
  int64_t expected = 0;
};

/// A router, and what gates shared experts, keep 16 bits: a choice of experts hangs on little, and they are narrow.
bool is_product(const Op& op) {
  if (std::holds_alternative<GroupedLinear>(op.work)) return true;
  return std::holds_alternative<Linear>(op.work) && op.label != "moe.router" && op.label != "moe.shared.gate";
}

/// Who will read what is rounded.
enum class Keep : uint8_t {
  kNothing,  ///< this segment alone
  kScale,    ///< backward rounds again with the same scale
  kAll,      ///< backward reads it
};

/// Rewrites the products of a layer, forward and backward.
class Rounding {
 public:
  Rounding(Draft& draft, UnitKind kind) : draft_(draft), layer_(draft.of(kind)), scaling_(scaling_of(draft.config)) {}

  void run() {
    rewrite(layer_.forward, [&](const Op& op) { return forward(op); });
    rewrite(layer_.backward, [&](const Op& op) { return backward(op); });
    keep_what_is_read();
    drop_unread(layer_.forward);
    drop_unread(layer_.backward);
  }

 private:
  /// Puts what `with` adds, and the op that it makes of it, in place of every product.
  template <class With>
  void rewrite(DraftSegment& segment, With with) {
    segment_ = &segment;
    gathers_.clear();
    arrived_.clear();
    find_readers(segment);
    std::vector<Step> steps = std::exchange(segment.segment.steps, {});
    for (Step& step : steps) {
      Op op = std::move(std::get<Op>(step));
      const auto* c = std::get_if<Collective>(&op.work);
      const int32_t made = op.writes.empty() ? -1 : op.writes[0].value;
      if (c != nullptr && c->kind == CollectiveKind::kAllGather && !read_otherwise_.contains(made)) {
        gathers_[made] = std::move(op);  // of what products alone take: rounded first
        continue;
      }
      if (moves_packed_rows(op) && awaited_.contains(made)) {
        exchange(op);
        continue;
      }
      if (is_product(op)) {
        op = with(op);
        op.strategy = kFp8Name;
      }
      for (SlotId& read : op.reads)  // how many rows have come is judged by what has come
        if (const auto there = arrived_.find(read.value); there != arrived_.end()) read = there->second.values;
      segment.segment.steps.emplace_back(std::move(op));
    }
  }

  /// Slots that something else than a product in 8 bits reads, and rows of experts that products take: the name of that factor, and how
  /// many rows are expected.
  void find_readers(const DraftSegment& segment) {
    read_otherwise_.clear();
    awaited_.clear();
    for (const Step& step : segment.segment.steps) {
      const Op& op = std::get<Op>(step);
      if (!is_product(op))
        for (const SlotId read : op.reads) read_otherwise_.insert(read.value);
      const auto* grouped = std::get_if<GroupedLinear>(&op.work);
      if (grouped != nullptr && grouped->phase != Phase::kW)
        awaited_[op.reads[0].value] = {op.label + (grouped->phase == Phase::kF ? ".x" : ".dy"), grouped->rows};
    }
  }

  /// Rows of experts travel in 8 bits, and the scales of their blocks ahead of them: those have come when these have.
  void exchange(const Op& op) {
    const SlotId there = op.writes[0];
    const auto& [name, expected] = awaited_.at(there.value);
    const bool keep = segment_ == &layer_.forward;
    const Factor home = round(name + ".home", op.reads[0], DType::f8e4m3, Keep::kNothing, {op.reads[1], expected});
    Type narrow = segment_->slot(there).type;
    const Type scales = blocks_of(narrow, false);
    narrow.dtype = DType::f8e4m3;
    const Factor come{add(name + ".q", narrow, keep), add(scale_name(name), scales, keep)};
    for (const auto& [from, to, beside] : {std::tuple{home.scales, come.scales, ".scales"}, {home.values, come.values, ""}}) {
      std::vector<SlotId> reads = op.reads;
      reads[0] = from;
      Collective work = std::get<Collective>(op.work);
      if (crosses_weighed(op)) reads.resize(3), work.across = 0;  // a product is rounded otherwise than its factors
      emit(work, std::move(reads), {to}, op.label + beside);
      std::get<Op>(segment_->segment.steps.back()).stream = op.stream;
    }
    arrived_[there.value] = come;
  }

  Op forward(Op op) {
    if (std::holds_alternative<GroupedLinear>(op.work)) return grouped_forward(std::move(op));
    const Factor x = gathered(
        op.label + ".x", op.reads[0],
        round(op.label + ".x", part_of(op.reads[0]), DType::f8e4m3, is_kept_whole(op.reads[0]) ? Keep::kNothing : Keep::kAll));
    const Factor w = round(op.label + ".w", op.reads[1], DType::f8e4m3, Keep::kScale);
    op.reads.erase(op.reads.begin(), op.reads.begin() + 2);  // a bias stays
    op.reads.insert(op.reads.begin(), {x.values, w.values, x.scales, w.scales});
    return op;
  }

  Op grouped_forward(Op op) {
    const Rows rows{op.reads[2], std::get<GroupedLinear>(op.work).rows};
    const Factor x = rows_factor(op.label + ".x", op.reads[0], Keep::kAll, rows);
    const Factor w = round(op.label + ".w", op.reads[1], DType::f8e4m3, Keep::kScale);
    op.reads = {x.values, w.values, rows.counts, x.scales, w.scales};
    return op;
  }

  Op grouped_backward(Op op) {
    const bool input = phase_of(op.work) == Phase::kI;
    const Rows rows{op.reads[2], std::get<GroupedLinear>(op.work).rows};
    const auto [known, fresh] = gradients_.try_emplace(op.label);
    if (fresh) known->second = rows_factor(op.label + ".dy", op.reads[input ? 0 : 1], Keep::kNothing, rows);
    const Factor dy = known->second;
    const Factor left = input ? dy : kept(op.label + ".x"), right = input ? round_again(op.label + ".w", op.reads[1]) : dy;
    op.reads = {left.values, right.values, rows.counts, left.scales, right.scales};
    return op;
  }
  /// Rows that have come in 8 bits, or are rounded where they are.
  Factor rows_factor(const std::string& name, SlotId from, Keep keep, const Rows& rows) {
    const auto there = arrived_.find(from.value);
    return there != arrived_.end() ? there->second : round(name, from, DType::f8e4m3, keep, rows);
  }

  /// Whether an input is gathered in 16 bits, since others take it too: backward gathers it as well, and rounds it again.
  bool is_kept_whole(SlotId operand) const {
    const std::string& name = segment_->slot(operand).name;
    return read_otherwise_.contains(operand.value) && segment_->uses[operand.index()].use == Use::kLocal &&
           layer_.backward.find_if(name).has_value();
  }

  Op backward(Op op) {
    if (std::holds_alternative<GroupedLinear>(op.work)) return grouped_backward(std::move(op));
    const bool input = phase_of(op.work) == Phase::kI;
    const SlotId gradient = op.reads[input ? 0 : 1];
    const auto [known, fresh] = gradients_.try_emplace(op.label);
    if (fresh)
      known->second =
          gathered(op.label + ".dy", gradient, round(op.label + ".dy", part_of(gradient), gradient_format(), Keep::kNothing));
    const Factor dy = known->second;
    if (input) {
      const Factor w = round_again(op.label + ".w", op.reads[1]);
      op.reads = {dy.values, w.values, dy.scales, w.scales};
      return op;
    }
    const Factor x = segment_->find_if(op.label + ".x.q") ? gathered(op.label + ".x", op.reads[0], kept(op.label + ".x"))
                                                          : round_again(op.label + ".x", op.reads[0]);
    op.reads = {x.values, dy.values, x.scales, dy.scales};
    if (std::get<Linear>(op.work).bias) op.reads.push_back(gradient);
    return op;
  }

  DType gradient_format() const { return scaling_ == Scaling::kBlock ? DType::f8e4m3 : DType::f8e5m2; }
  std::string scale_name(const std::string& name) const { return name + (scaling_ == Scaling::kBlock ? ".scales" : ".scale"); }

  /// What is rounded of a product's operand: the rank's part of it, where the operand is gathered.
  SlotId part_of(SlotId operand) const {
    const auto gather = gathers_.find(operand.value);
    return gather == gathers_.end() ? operand : gather->second.reads[0];
  }
  /// The factor that stands for `operand`: its part in 8 bits is gathered where the operand was, with the scales of blocks.
  Factor gathered(const std::string& name, SlotId operand, Factor part) {
    const auto gather = gathers_.find(operand.value);
    if (gather == gathers_.end()) return part;
    const auto all = [&](const std::string& slot, SlotId from, const std::string& beside) {
      Type whole = segment_->slot(operand).type;
      whole.dtype = segment_->slot(from).type.dtype;
      whole.shape[whole.shape.rank - 1] = segment_->slot(from).type.shape.last();
      const SlotId to = add(slot + ".all", whole, false);
      std::string label = gather->second.label;
      const auto again = label.find(".again");
      label.insert(again == std::string::npos ? label.size() : again, beside);
      emit(gather->second.work, {from}, {to}, std::move(label));
      std::get<Op>(segment_->segment.steps.back()).stream = gather->second.stream;
      return to;
    };
    const SlotId values = all(name + ".q", part.values, "");
    return {values, scaling_ == Scaling::kBlock ? all(scale_name(name), part.scales, ".scales") : part.scales};
  }

  Factor round(const std::string& name, SlotId from, DType format, Keep keep, const Rows& rows = {}) {
    const Type type = segment_->slot(from).type;
    Type narrow = type;
    narrow.dtype = format;
    const SlotId values = add(name + ".q", narrow, keep == Keep::kAll);
    if (scaling_ == Scaling::kBlock) {
      const bool weight = type.micro == Micro::kNone;
      const SlotId scales = add(scale_name(name), blocks_of(type, weight), keep == Keep::kAll);
      Kernel kernel = named(weight ? "fp8_quantise_128x128" : "fp8_quantise_1x128");
      std::vector<SlotId> reads{from};
      if (rows.counts) {
        kernel.counted = true;
        kernel.rows = rows.expected;
        reads.push_back(rows.counts);
      }
      emit(std::move(kernel), std::move(reads), {values, scales}, name + ".quantise");
      return {values, scales};
    }
    const SlotId scale = scaling_ == Scaling::kDelayed ? delayed_scale(name, from) : current_scale(name, from, format, keep);
    emit(named("fp8_quantise"), {from, scale}, {values}, name + ".quantise");
    return {values, scale};
  }

  /// A weight, or an input that is there in 16 bits, in backward: rounded with forward's scale.
  Factor round_again(const std::string& name, SlotId from) {
    if (scaling_ != Scaling::kBlock) {
      const SlotId scale =
          segment_->find_if(scale_name(name)) ? segment_->find(scale_name(name)) : add_named(name + ".scale", false);
      Type narrow = segment_->slot(from).type;
      narrow.dtype = DType::f8e4m3;
      const SlotId values = add(name + ".q", narrow, false);
      emit(named("fp8_quantise"), {from, scale}, {values}, name + ".quantise.again");
      return {values, scale};
    }
    const Factor w = round(name, from, DType::f8e4m3, Keep::kNothing);
    std::get<Op>(segment_->segment.steps.back()).label += ".again";
    return w;
  }

  /// What forward kept of an input.
  Factor kept(const std::string& name) {
    const SlotId values = segment_->find(name + ".q");
    if (const auto scale = segment_->find_if(scale_name(name))) return {values, *scale};
    return {values, add_named(name + ".scale", false)};
  }

  /// amax, over tp where the tensor is cut, and the scale for it.
  SlotId current_scale(const std::string& name, SlotId from, DType format, Keep keep) {
    const Type type = segment_->slot(from).type;
    Type one;
    one.shape = {1};
    one.micro = Micro::kSlice;  // also a weight's: forward notes it for the backward of its micro-batch
    const int tp = draft_.plan.mesh.axis("tp");
    for (const int axis : cutting_axes(draft_.plan.mesh))  // on data axes a slice is a tensor of its own
      if (axis != tp && type.place[static_cast<size_t>(axis)].is_shard()) one = placed(one, axis, Placement::local());
    const SlotId amax = add(name + ".amax", one, false);
    const bool cut = draft_.config.layout.tp > 1 && type.place[static_cast<size_t>(tp)].is_shard();
    const SlotId part = cut ? segment_->add_view(name + ".amax.part", amax, placed(one, tp, Placement::partial())) : amax;
    emit(named("amax"), {from}, {part}, name + ".amax");
    if (cut)
      emit(Collective{CollectiveKind::kAllReduce, ReduceOp::kMax, draft_.comm("tp", AxisSet::of(tp)), draft_.algorithm()}, {part},
           {amax}, name + ".amax.all");
    const SlotId scale = add(scale_name(name), one, keep != Keep::kNothing);
    emit(named(format == DType::f8e4m3 ? "fp8_scale_e4m3" : "fp8_scale_e5m2"), {amax}, {scale}, name + ".scale");
    return scale;
  }

  /// The step's scale; what the tensor's size is goes to the steps to come.
  SlotId delayed_scale(const std::string& name, SlotId from) {
    const SlotId scale = add_named(name + ".scale", false);
    if (!draft_.training) return scale;
    const SlotId amax = add_named(name + ".amax", true);
    emit(named("amax"), {from, amax}, {amax}, name + ".amax");
    return scale;
  }

  static Type blocks_of(Type type, bool weight) {
    Shape& s = type.shape;
    const int last = s.rank - 1;
    s[last] = (s[last] + kBlock - 1) / kBlock;
    if (weight) s[last - 1] = (s[last - 1] + kBlock - 1) / kBlock;
    type.dtype = DType::f32;
    return type;
  }

  SlotId add(std::string name, const Type& type, bool saved) {
    if (!saved) return segment_->add(std::move(name), type, Use::kLocal, BufferClass::kTemporary);
    layer_.backward.add(name, type, Use::kSaved, BufferClass::kActivation);
    return layer_.forward.add(std::move(name), type, Use::kSaved, BufferClass::kActivation);
  }
  SlotId add_named(const std::string& name, bool partial) {
    return segment_->add(name, numbers(draft_.plan.mesh, 1, partial), Use::kNamed, BufferClass::kOther);
  }
  void emit(Work work, std::vector<SlotId> reads, std::vector<SlotId> writes, std::string label) {
    segment_->op(std::move(work), std::move(reads), std::move(writes), std::move(label), kFp8Name);
  }

  /// What was gathered, or has come to the experts, in 16 bits no longer is.
  void drop_unread(DraftSegment& segment) {
    for (size_t s = segment.uses.size(); s-- > 0;) {
      const SlotId slot(static_cast<int32_t>(s));
      if (segment.uses[s].use == Use::kLocal && !segment.slot(slot).view && !is_used(segment, slot)) erase(segment, slot);
    }
  }

  /// What backward no longer reads is not kept for it.
  void keep_what_is_read() {
    DraftSegment& backward = layer_.backward;
    for (size_t s = backward.uses.size(); s-- > 0;) {
      const SlotId slot(static_cast<int32_t>(s));
      if (backward.uses[s].use != Use::kSaved || is_used(backward, slot)) continue;
      const SlotId there = layer_.forward.find(backward.slot(slot).name);
      layer_.forward.uses[there.index()].use = Use::kLocal;
      layer_.forward.slot(there).kind = SlotKind::kLocal;
      layer_.forward.slot(there).cls = BufferClass::kTemporary;
      erase(backward, slot);
    }
  }
  static bool is_used(const DraftSegment& segment, SlotId slot) {
    const auto has = [&](const std::vector<SlotId>& list) { return std::ranges::find(list, slot) != list.end(); };
    return std::ranges::any_of(segment.segment.steps,
                               [&](const Step& s) { return has(std::get<Op>(s).reads) || has(std::get<Op>(s).writes); }) ||
           std::ranges::any_of(segment.segment.slots, [&](const Slot& s) { return s.view && s.view->base == slot.value; });
  }
  static void erase(DraftSegment& segment, SlotId gone) {
    segment.segment.slots.erase(segment.segment.slots.begin() + gone.value);
    segment.uses.erase(segment.uses.begin() + gone.value);
    for (Slot& s : segment.segment.slots)
      if (s.view && s.view->base > gone.value) --s.view->base;
    for (Step& step : segment.segment.steps)
      for (auto* operands : {&std::get<Op>(step).reads, &std::get<Op>(step).writes})
        for (SlotId& s : *operands)
          if (s.value > gone.value) --s.value;
  }

  Draft& draft_;
  UnitTemplate& layer_;
  const Scaling scaling_;
  DraftSegment* segment_ = nullptr;                             ///< the one that is being rewritten
  std::map<int32_t, Op> gathers_;                               ///< of operands of products, by the slot that was gathered
  std::map<int32_t, std::pair<std::string, int64_t>> awaited_;  ///< by slot of rows of experts: the factor's name, rows expected
  std::map<int32_t, Factor> arrived_;                           ///< rows that have come in 8 bits, by the slot that they had in 16
  std::set<int32_t> read_otherwise_;                            ///< slots that are read in 16 bits
  std::map<std::string, Factor> gradients_;                     ///< by product
};

/// Delayed scaling on one stage. A layer's tensors are rows: x and w of each product, rounded to e4m3, then dy of each, to e5m2.
class History {
 public:
  History(Draft& draft, StageDraft& stage) : draft_(draft), stage_(stage) {
    for (const int unit : stage.units)
      if (is_layer(draft.units[static_cast<size_t>(unit)].kind)) layers_.push_back(draft.units[static_cast<size_t>(unit)].layer);
    const int64_t rows = kForward + kBackward;
    if (draft.training) amax_ = add("fp8.amax", numbers(draft.plan.mesh, rows * static_cast<int64_t>(layers_.size()), true));
  }

  void run() {
    std::vector<Event> first, last;
    if (draft_.training) {
      first.push_back(call("fp8.amax.begin", {amax_}, Fill{0}, {}, {0}));
      agree(last);
    }
    for (size_t i = 0; i < layers_.size(); ++i)
      for (const bool back : {false, true}) {
        if (back && !draft_.training) continue;
        const std::string part = back ? "backward" : "forward";
        const int64_t rows = back ? kBackward : kForward,
                      offset = static_cast<int64_t>(i) * (kForward + kBackward) + (back ? kForward : 0);
        const std::string layer = "layers." + std::to_string(layers_[i]);
        Buffer history;
        history.name = "amax." + layer + "." + part;
        history.type.shape = {rows, kFp8Window};
        history.kind = BufferClass::kOther;
        history.persistent = true;
        const BufferId past = add_buffer(stage_, std::move(history));
        const BufferId scales = add(layer + ".fp8.scales." + part, numbers(draft_.plan.mesh, rows, false));
        name_rows(layer, back, scales, offset);
        const std::string format = back ? "e5m2" : "e4m3";
        first.push_back(call("fp8.scales." + part, {past, scales}, named("fp8_scales_" + format), {0}, {1}));
        if (!draft_.training) continue;
        const BufferId seen = view(layer + ".fp8.amax." + part, amax_, offset, numbers(draft_.plan.mesh, rows, false));
        last.push_back(call("fp8.remember." + part, {seen, past}, named("fp8_remember"), {0, 1}, {1}));
      }
    stage_.events.insert(stage_.events.begin(), std::make_move_iterator(first.begin()), std::make_move_iterator(first.end()));
    stage_.events.insert(stage_.events.end(), std::make_move_iterator(last.begin()), std::make_move_iterator(last.end()));
  }

 private:
  static constexpr int64_t kForward = 2 * static_cast<int64_t>(kProducts.size());
  static constexpr int64_t kBackward = static_cast<int64_t>(kProducts.size());

  BufferId add(std::string name, Type type) {
    Buffer b;
    b.name = std::move(name);
    b.type = std::move(type);
    b.kind = BufferClass::kOther;
    const BufferId id = add_buffer(stage_, std::move(b));
    stage_.whole_step.push_back(id);
    return id;
  }
  BufferId view(std::string name, BufferId base, int64_t offset, Type type) {
    Buffer b;
    b.name = std::move(name);
    b.type = std::move(type);
    b.kind = BufferClass::kOther;
    b.view = View{base.value, offset, {}};
    return add_buffer(stage_, std::move(b));
  }
  /// The numbers that the layer's segments read and write: rows of `scales`, and of the stage's sizes from `offset` on.
  void name_rows(const std::string& layer, bool back, BufferId scales, int64_t offset) {
    int64_t row = 0;
    for (const std::string_view product : kProducts)
      for (const char* tensor : {".x", ".w", ".dy"}) {
        if ((std::string_view(tensor) == ".dy") != back) continue;
        const std::string name = layer + "." + std::string(product) + tensor;
        stage_.named[name + ".scale"] = view(name + ".scale", scales, row, numbers(draft_.plan.mesh, 1, false));
        if (draft_.training)
          stage_.named[name + ".amax"] = view(name + ".amax", amax_, offset + row, numbers(draft_.plan.mesh, 1, true));
        ++row;
      }
  }
  /// The greatest over all ranks that hold other sequences or slices: what each saw becomes what all know.
  void agree(std::vector<Event>& last) {
    AxisSet axes;
    for (const int axis : cutting_axes(draft_.plan.mesh)) axes = axes | AxisSet::of(axis);
    if (axes.empty()) return;
    const BufferId all =
        view("fp8.amax.all", amax_, 0, numbers(draft_.plan.mesh, stage_.role.buffers[amax_.index()].type.shape[0], false));
    const Collective work{CollectiveKind::kAllReduce, ReduceOp::kMax, draft_.comm("amax", axes), draft_.algorithm()};
    last.push_back(call("fp8.amax.all", {amax_, all}, work, {0}, {1}));
  }
  Event call(const std::string& name, std::vector<BufferId> buffers, Work work, const std::vector<int>& reads,
             const std::vector<int>& writes) {
    const int64_t rows = stage_.role.buffers[buffers[0].index()].type.shape[0];
    const SegmentId segment = draft_.cached(name + "." + std::to_string(rows), [&] {
      Op op;
      op.work = std::move(work);
      op.label = name;
      op.strategy = kFp8Name;
      return one_op_segment(name, stage_, buffers, std::move(op), reads, writes);
    });
    return call_event(bind(segment, std::move(buffers)));
  }

  Draft& draft_;
  StageDraft& stage_;
  std::vector<int> layers_;
  BufferId amax_;  ///< sizes that the step has seen so far
};

}  // namespace

void multiply_in_fp8(Draft& draft) {
  for (const UnitKind kind : draft.layer_kinds()) Rounding(draft, kind).run();
}

void remember_amax(Draft& draft) {
  for (StageDraft& stage : draft.stages) History(draft, stage).run();
}

}  // namespace shardlab::strategies
