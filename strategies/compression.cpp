#include "strategies/compression.h"

#include <algorithm>

#include "plan/base/check.h"
#include "plan/named_kernels.h"

namespace shardlab::strategies {

std::string WireCode::kernel(std::string_view verb) const {
  if (bits == 1) return verb == "quantise" ? "sign_compress" : "sign_expand";
  return scaled() ? std::string(verb) + (bits == 4 ? "_int4" : "_int8") : "copy";
}

std::string WireCode::sum_kernel() const {
  return bits == 1 ? "sign_expand_sum" : scaled() ? kernel("dequantise_sum") : "sum_rows";
}

WireCode code_of(const Compression& compression) {
  if (compression.kind == CompressionKind::kBf16) return {};
  return compression.bits == 4 ? WireCode{DType::u8, 4} : WireCode{DType::i8, 8};
}

Compressing::Compressing(Draft& draft, StageDraft& stage, std::string name, std::string_view strategy,
                         std::optional<StreamId> stream)
    : draft_(draft), stage_(stage), strategy_(strategy), stream_(stream ? *stream : reduction_stream(draft)) {
  segment_.name = std::move(name);
}

SlotId Compressing::bound(std::string name, BufferId buffer) {
  const Buffer& b = stage_.role.buffers[buffer.index()];
  Slot slot;
  slot.name = std::move(name);
  slot.type = b.type;
  slot.cls = b.kind;
  slot.space = b.space;
  slot.kind = SlotKind::kBound;
  segment_.slots.push_back(std::move(slot));
  binding_.push_back(buffer);
  return SlotId(static_cast<int32_t>(segment_.slots.size()) - 1);
}

SlotId Compressing::find(std::string_view name) const {
  const auto found = std::ranges::find(segment_.slots, name, &Slot::name);
  SHARDLAB_CHECK(found != segment_.slots.end(), "`{}` has no slot {}", segment_.name, name);
  return SlotId(static_cast<int32_t>(found - segment_.slots.begin()));
}

SlotId Compressing::view(std::string name, SlotId base, Type type, bool slice) {
  Slot slot = segment_.slots[base.index()];
  slot.name = std::move(name);
  slot.type = std::move(type);
  slot.kind = SlotKind::kLocal;
  slot.view = View{base.value, 0, slice ? data_axes(draft_.plan.mesh) : AxisSet{}};
  segment_.slots.push_back(std::move(slot));
  binding_.emplace_back();
  return SlotId(static_cast<int32_t>(segment_.slots.size()) - 1);
}

void Compressing::op(Work work, std::vector<SlotId> reads, std::vector<SlotId> writes, std::string label) {
  Op op;
  op.work = std::move(work);
  op.reads = std::move(reads);
  op.writes = std::move(writes);
  op.stream = stream_;
  op.label = std::move(label);
  op.strategy = strategy_;
  segment_.steps.emplace_back(std::move(op));
}

void Compressing::kernel(std::string_view name, std::vector<SlotId> reads, std::vector<SlotId> writes, std::string label) {
  op(named(name), std::move(reads), std::move(writes), std::move(label));
}

void Compressing::collective(CollectiveKind kind, SlotId from, SlotId to, std::string label) {
  collective(kind, draft_.comm("dp.grads", data_axes(draft_.plan.mesh)), from, to, std::move(label));
}

void Compressing::collective(CollectiveKind kind, CommId comm, SlotId from, SlotId to, std::string label) {
  op(Collective{kind, ReduceOp::kSum, comm, draft_.algorithm()}, {from}, {to}, std::move(label));
}

Call Compressing::call() {
  const std::string name = segment_.name;
  const SegmentId id = draft_.cached(name, [&] { return std::move(segment_); });
  return bind(id, std::move(binding_));
}

Event Compressing::event(int unit, std::optional<int> micro_batch) {
  return call_event(call(), unit, micro_batch.value_or(draft_.micro_batches() - 1));
}

BufferId add_error(StageDraft& stage, std::string name, Type like) {
  Buffer error;
  error.name = std::move(name);
  error.type = std::move(like);
  error.type.micro = Micro::kNone;
  error.kind = BufferClass::kOther;
  error.persistent = true;
  return add_buffer(stage, std::move(error));
}

BufferId add_message(StageDraft& stage, std::string name, Type type) {
  Buffer message;
  message.name = std::move(name);
  message.type = std::move(type);
  message.kind = BufferClass::kBuffer;
  const BufferId id = add_buffer(stage, std::move(message));
  stage.whole_step.push_back(id);
  return id;
}

BufferId add_message_view(StageDraft& stage, std::string name, Type type, BufferId base) {
  Buffer message;
  message.name = std::move(name);
  message.type = std::move(type);
  message.kind = BufferClass::kBuffer;
  message.view = View{base.value, 0, {}};
  return add_buffer(stage, std::move(message));
}

Type message_type(const Draft& draft, Type type, DType dtype, Shape shape, Placement place, Micro micro) {
  for (Placement& along : type.place)  // what is made of a summand (a stage's part of a tied table) is no summand
    if (along.is_partial()) along = Placement::local();
  type = placed(std::move(type), data_axes(draft.plan.mesh), place);
  type.dtype = dtype;
  type.shape = shape;
  type.micro = micro;
  return type;
}

}  // namespace shardlab::strategies
