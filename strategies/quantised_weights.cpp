// qwZ, the quantised weight gather of ZeRO++: what ZeRO-3 gathers travels in 8 bits.
//
// Each rank quantises its slice of a bucket in equal blocks of at most 256 elements with a scale each, gathers codes and scales,
// and makes all of it whole in the parameters' type, its own slice as well: so every rank computes with the same values, which are
// those of the slices but for the rounding. The slices themselves, which the optimizer updates, are never rounded, so that errors
// do not add up. Forward and backward of a step see the same values, whichever way backward gathers.
//
// Codes of all buckets take turns in one buffer, and so do scales: the stream that gathers has one bucket on its way at a time.
//
// Shapes   bucket[n], slices [n/N]; codes i8 [n], scales f32 [N blocks]
// Adds     all-gather of codes and of scales in place of the parameters: (1 + 4/256) Psi (N-1)/N bytes each time
// Memory   codes and scales of the largest bucket: 1 + 4/256 bytes an element
// Refuses  zero other than 3
// Paper    Wang et al., "ZeRO++" (2023), section 3.1
#include <algorithm>

#include "strategies/zero_plus_plus.h"

namespace shardlab::strategies {
namespace {

constexpr std::string_view kQuantisedWeightsName = "quantised-weights";
constexpr WireCode kCode{DType::i8, 8};

/// A message of `n` elements that every rank has alike, in the place of a bucket's values.
Type message(const Draft& draft, const Type& flat, DType dtype, int64_t n, Placement place) {
  return message_type(draft, flat, dtype, {n}, place, Micro::kNone);
}

}  // namespace

QuantisedGather::QuantisedGather(Draft& draft, StageDraft& stage, const Shards& shards, StreamId stream)
    : draft_(draft), stage_(stage), ranks_(shards.ranks()), stream_(stream) {
  int64_t codes = 0, scales = 0;
  for (const Bucket& bucket : stage.buckets) {
    if (shards.shares_values(bucket)) continue;
    codes = std::max(codes, bucket.elements);
    scales = std::max(scales, ranks_ * blocks_of(bucket.elements / ranks_));
  }
  if (codes == 0) return;
  const Bucket::Member& first = stage.buckets.front().members.front();
  const Type value = stage.role.buffers[stage.at(first.unit, first.parameter).value.index()].type;
  codes_ = add_message(stage, "gather.codes", message(draft, value, kCode.dtype, codes, Placement::local()));
  scales_ = add_message(stage, "gather.scales", message(draft, value, DType::f32, scales, Placement::local()));
}

QuantisedGather::Messages QuantisedGather::messages_of(const Bucket& bucket, const Type& flat) {
  const auto known = messages_.find(bucket.name);
  if (known != messages_.end()) return known->second;
  const int64_t scales = ranks_ * blocks_of(bucket.elements / ranks_);
  const auto view = [&](const char* what, DType dtype, int64_t n, BufferId base) {
    return add_message_view(stage_, bucket.name + what, message(draft_, flat, dtype, n, Placement::replicate()), base);
  };
  return messages_[bucket.name] = {view(".value.codes", kCode.dtype, bucket.elements, codes_),
                                   view(".value.scales", DType::f32, scales, scales_)};
}

Call QuantisedGather::gather(const Bucket& bucket, BufferId slice, BufferId flat) {
  const Type whole = stage_.role.buffers[flat.index()].type;
  const int64_t n = bucket.elements, part = n / ranks_, blocks = blocks_of(part);
  const Messages messages = messages_of(bucket, whole);
  Compressing ops(draft_, stage_, "gather.quantised." + signature(draft_, stage_, bucket), kQuantisedWeightsName, stream_);
  const CommId comm = draft_.comm("dp.parameters", data_axes(draft_.plan.mesh));
  const SlotId from = ops.bound("slice", slice), to = ops.bound("parameters", flat);
  const SlotId codes = ops.bound("codes", messages.codes), scales = ops.bound("scales", messages.scales);
  const Placement cut = Placement::shard(0);
  const SlotId own_codes = ops.view("codes.slice", codes, message(draft_, whole, kCode.dtype, part, cut), true);
  const SlotId own_scales = ops.view("scales.slice", scales, message(draft_, whole, DType::f32, blocks, cut), true);
  ops.kernel(kCode.kernel("quantise"), {from}, {own_codes, own_scales}, "quantise");
  ops.collective(CollectiveKind::kAllGather, comm, own_codes, codes, "parameters");
  ops.collective(CollectiveKind::kAllGather, comm, own_scales, scales, "parameters.scales");
  ops.kernel(kCode.kernel("dequantise"), {codes, scales}, {to}, "dequantise");
  return ops.call();
}

}  // namespace shardlab::strategies
