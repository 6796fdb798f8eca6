// Gradients in 16, 8 or 4 bits on the wire, with error feedback on both legs of the reduction.
//
// A ring that adds integers on its way overflows, and one that adds 16-bit floats rounds at every hop; so the sum is made of an
// all-to-all and an all-gather (what a ring's two phases move, in other hands). Each rank quantises m = gradient + error, sends
// every other rank its slice of that, adds up in fp32 the slices that it receives, quantises the sum with what the last sum lost,
// and gathers. What either leg loses stays as an error: m less what was sent of it, on every rank, and the sum's, on the rank of
// the slice. The difference of a number and what it was rounded to is a number of fp32, so not a bit is lost: sent + error =
// gradient + old error.
//
// Buckets are those of data parallelism, padded so that every slice is cut in equal blocks of at most 256 elements, which share a
// scale (their largest size / 127, or / 7). Codes of all buckets take turns in two buffers; scales have some of their own.
//
// Shapes   bucket[n], codes [n], scales [N blocks]; slices [n/N]
// Adds     all-to-all and all-gather of the codes, and of the scales: 2 (N-1)/N (b/8 + 4/256) bytes an element; b = 16: no scales
// Memory   errors 4 (1 + 1/N) bytes an element; two buffers of the largest bucket's codes; 8 bytes a block of scales
// Refuses  dp = 1; zero 3 (ZeRO-1 and 2: quantised_scatter.cpp); gradients narrower than fp32; fp16 and guards; a checkpoint of
//          another layout, whose errors belong to other ranks and buckets
// Paper    Seide et al., "1-Bit Stochastic Gradient Descent" (2014): error feedback; Wang et al., "ZeRO++" (2023), section 3.3: the
//          all-to-all; Tang et al., "1-bit Adam" (2021): errors on both legs
#include <algorithm>

#include "strategies/compression.h"
#include "strategies/data_parallel.h"

namespace shardlab::strategies {
namespace {

constexpr std::string_view kQuantisedGradientsName = "quantised-gradients";

class QuantisedReduction {
 public:
  QuantisedReduction(Draft& draft, StageDraft& stage, const WireCode& code, const AroundLegs& around)
      : draft_(draft), stage_(stage), code_(code), around_(around), ranks_(draft.plan.mesh.size("dp")) {}

  void run() {
    fill_coded_buckets(draft_, stage_, code_);
    if (stage_.buckets.empty()) return;
    int64_t most = 0;
    for (Bucket& bucket : stage_.buckets) {
      declare_reduced(draft_, stage_, bucket);
      most = std::max(most, bucket.elements);
    }
    const Type& gradient = type_of(stage_.buckets.front().gradient);
    const Type any = message_type(draft_, gradient, code_.dtype, {code_.of(most)}, Placement::local(), Micro::kNone);
    mine_ = add_message(stage_, "codes.mine", any);
    parts_ = add_message(stage_, "codes.parts", any);
    when_complete(draft_, stage_, [&](Bucket& bucket) { return compress(bucket); });
  }

 private:
  const Type& type_of(BufferId id) const { return stage_.role.buffers[id.index()].type; }
  Type message(const Bucket& bucket, DType dtype, Shape shape, Placement place, Micro micro) const {
    return message_type(draft_, type_of(bucket.gradient), dtype, shape, place, micro);
  }

  /// Messages of one dtype: this rank's row, the parts that it receives of all rows, its slice of the sum, and all of the sum.
  struct Wire {
    SlotId mine, parts, slice, all;
  };

  /// Slots for `n` elements of a bucket; `mine` and `parts` are bound to the buffers.
  Wire wire(Compressing& ops, const Bucket& bucket, const std::string& name, DType dtype, int64_t n, Micro micro, BufferId mine,
            BufferId parts) {
    Wire w;
    w.mine = ops.bound(name + ".mine", mine);
    w.parts = ops.bound(name + ".parts", parts);
    w.slice = ops.view(name + ".slice", w.mine, message(bucket, dtype, {n / ranks_}, Placement::shard(0), micro), true);
    w.all = ops.view(name + ".all", w.mine, message(bucket, dtype, {n}, Placement::replicate(), micro));
    return w;
  }
  Type mine_type(const Bucket& bucket, DType dtype, int64_t n, Micro micro) const {
    return message(bucket, dtype, {1, n}, Placement::shard(0), micro);
  }
  Type parts_type(const Bucket& bucket, DType dtype, int64_t n, Micro micro) const {
    return message(bucket, dtype, {ranks_, n / ranks_}, Placement::shard(1), micro);
  }

  Event compress(Bucket& bucket) {
    const int64_t n = bucket.elements, codes = code_.of(n);
    const int64_t slice = n / ranks_, scales = ranks_ * code_.scales_of(slice);
    const Type whole = type_of(bucket.gradient);
    const Type sliced = message(bucket, DType::f32, {slice}, Placement::shard(0), Micro::kSum);
    const Micro sum = Micro::kSum, none = Micro::kNone;

    Compressing ops(draft_, stage_, around_.name(bucket), around_.strategy);
    const SlotId gradient = ops.bound("gradient", bucket.gradient), reduced = ops.bound("sum", bucket.reduced);
    const LegErrors errors = add_leg_errors(draft_, stage_, bucket);
    const SlotId error = ops.bound("error", errors.whole), error_of_sum = ops.bound("error.slice", errors.slice);
    const SlotId m = ops.view("m", error, whole), m_sum = ops.view("m.slice", error_of_sum, sliced);
    const SlotId sent = ops.view("sent", reduced, ops.type(error)), part = ops.view("part", reduced, sliced, true);
    const SlotId sent_part = ops.view("sent.slice", reduced, ops.type(error_of_sum), true);

    code_wires_.clear();
    code_wires_.push_back(
        wire(ops, bucket, "codes", code_.dtype, codes, sum,
             add_message_view(stage_, bucket.name + ".codes.mine", mine_type(bucket, code_.dtype, codes, sum), mine_),
             add_message_view(stage_, bucket.name + ".codes.parts", parts_type(bucket, code_.dtype, codes, sum), parts_)));
    if (code_.scaled())
      code_wires_.push_back(wire(ops, bucket, "scales", DType::f32, scales, none,
                                 add_message(stage_, bucket.name + ".scales.mine", mine_type(bucket, DType::f32, scales, none)),
                                 add_message(stage_, bucket.name + ".scales.parts", parts_type(bucket, DType::f32, scales, none))));

    if (around_.before) around_.before(ops, bucket, gradient);
    ops.kernel("add", {gradient, error}, {m}, "feedback");
    quantise(ops, m, &Wire::mine, "");
    dequantise(ops, &Wire::mine, sent, "sent");
    ops.kernel("subtract", {m, sent}, {error}, "error");
    exchange(ops, CollectiveKind::kAllToAll, &Wire::mine, &Wire::parts, "exchange");
    add_parts(ops, part);
    ops.kernel("add", {part, error_of_sum}, {m_sum}, "feedback.slice");
    quantise(ops, m_sum, &Wire::slice, ".slice");
    dequantise(ops, &Wire::slice, sent_part, "sent.slice");
    ops.kernel("subtract", {m_sum, sent_part}, {error_of_sum}, "error.slice");
    exchange(ops, CollectiveKind::kAllGather, &Wire::slice, &Wire::all, "gather");
    dequantise(ops, &Wire::all, reduced, "sum");
    if (around_.after) around_.after(ops, bucket, reduced);
    return ops.event(bucket.last_unit);
  }

  /// Codes, and their scales where they have some.
  std::vector<SlotId> slots(SlotId Wire::*which) const {
    std::vector<SlotId> all;
    for (const Wire& w : code_wires_) all.push_back(w.*which);
    return all;
  }
  /// Amax, division, rounding; or size, sum, sign.
  void quantise(Compressing& ops, SlotId x, SlotId Wire::*to, const std::string& suffix) const {
    ops.kernel(code_.kernel("quantise"), {x}, slots(to), "quantise" + suffix);
  }
  void dequantise(Compressing& ops, SlotId Wire::*from, SlotId y, const std::string& label) const {
    ops.kernel(code_.kernel("dequantise"), slots(from), {y}, label);
  }
  void add_parts(Compressing& ops, SlotId part) const { ops.kernel(code_.sum_kernel(), slots(&Wire::parts), {part}, "parts"); }
  void exchange(Compressing& ops, CollectiveKind kind, SlotId Wire::*from, SlotId Wire::*to, const std::string& label) const {
    for (size_t i = 0; i < code_wires_.size(); ++i)
      ops.collective(kind, code_wires_[i].*from, code_wires_[i].*to, label + (i == 0 ? "" : ".scales"));
  }

  Draft& draft_;
  StageDraft& stage_;
  const WireCode code_;
  const AroundLegs& around_;
  const int ranks_;
  BufferId mine_, parts_;         ///< the codes of whichever bucket is on its way
  std::vector<Wire> code_wires_;  ///< of the bucket in hand: codes, and scales
};

}  // namespace

void fill_coded_buckets(Draft& draft, StageDraft& stage, const WireCode& code) {
  const int64_t ranks = draft.plan.mesh.size("dp"), bytes = draft.config.layout.bucket_bytes;
  if (code.bits == 1)  // whole bytes of every slice
    fill_buckets(draft, stage, {.multiple = 8 * ranks, .bytes = bytes});
  else
    fill_buckets(draft, stage, {.multiple = ranks, .block = code.scaled() ? kScaleBlock : 0, .bytes = bytes});
}

LegErrors add_leg_errors(const Draft& draft, StageDraft& stage, const Bucket& bucket) {
  const Type whole = stage.role.buffers[bucket.gradient.index()].type;
  const Shape slice{bucket.elements / draft.plan.mesh.size("dp")};
  const BufferId error = add_error(stage, bucket.name + ".error", whole);
  return {error, add_error(stage, bucket.name + ".error.slice",
                           message_type(draft, whole, DType::f32, slice, Placement::shard(0), Micro::kSum))};
}

void reduce_in_codes(Draft& draft, StageDraft& stage, const WireCode& code, const AroundLegs& around) {
  QuantisedReduction(draft, stage, code, around).run();
}

void quantised_gradients(Draft& draft) {
  for (StageDraft& stage : draft.stages)
    reduce_in_codes(draft, stage, code_of(draft.config.layout.compression),
                    {kQuantisedGradientsName, [&](const Bucket& bucket) { return "compress." + signature(draft, stage, bucket); }});
}

}  // namespace shardlab::strategies
