#include "simulator/interpreter/bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "plan/work.h"

namespace shardlab::simulator {
namespace {

constexpr int64_t kNoiseElements = 1 << 16;
constexpr int64_t kAlignedElements = kAlignment / 4;
/// Passing results take turns within so many elements: 2 MiB in fp32, what a small model's layer has of them.
constexpr int64_t kPassingElements = 512 << 10;

Slot& add_slot(Segment& segment, Type type, BufferClass cls) {
  Slot slot;
  slot.name = fmt::format("s{}", segment.slots.size());
  slot.type = std::move(type);
  slot.cls = cls;
  slot.kind = SlotKind::kBound;
  segment.slots.push_back(std::move(slot));
  return segment.slots.back();
}

int64_t rounded(int64_t elements) { return (elements + kAlignedElements - 1) / kAlignedElements * kAlignedElements; }

}  // namespace

Type tensor(std::initializer_list<int64_t> extents) {
  Type type;
  type.shape = Shape(extents);
  return type;
}

Type ids(int64_t sequences, int64_t tokens) {
  Type type = tensor({sequences, tokens});
  type.dtype = DType::i32;
  return type;
}

Bench::Bench(std::string name, std::string axis, int ranks, const PoolSizes& pools, DType dtype) : dtype_(dtype) {
  plan_.name = std::move(name);
  plan_.mesh.axes = {{std::move(axis), ranks}};
  plan_.streams = {"compute"};
  plan_.strategies = {"calibration"};
  programs_.resize(plan_.mesh.find(kPipelineAxis) ? static_cast<size_t>(ranks) : 1);
  plan_.roles.resize(programs_.size());

  Parameter noise;
  noise.name = "noise";
  noise.type = tensor({kNoiseElements});
  noise.deviation = 1;
  noise.stages.resize(programs_.size());
  std::iota(noise.stages.begin(), noise.stages.end(), 0);
  plan_.parameters = {noise};

  Buffer b;
  b.persistent = true;
  b.name = "noise";
  b.type = noise.type;
  b.kind = BufferClass::kParameter;
  b.parameter = 0;
  noise_ = add_buffer(b);
  inputs_ = add_pool("inputs", pools.inputs);
  results_ = add_pool("results", pools.results);
  passing_ = add_pool("passing", pools.passing);

  for (int64_t block = 0; block < pools.inputs / kNoiseElements; ++block) {
    const BufferId to = window(inputs_, input_cursor_, typed(tensor({kNoiseElements})));
    for (size_t role = 0; role < programs_.size(); ++role)
      add_call("fill the pool", Copy{}, {noise_}, {{to}}, std::string(kPreparation), 0, programs_[role]);
  }
  input_cursor_ = 0;
}

Type Bench::rows(int64_t rows, int64_t width) const {
  const int64_t tokens = sequence_tokens(rows);
  return typed(tensor({rows / tokens, tokens, width}));
}

BufferId Bench::add_buffer(Buffer buffer) {
  if (buffer.name.empty()) buffer.name = fmt::format("w{}", plan_.roles[0].buffers.size());
  for (Role& role : plan_.roles) role.buffers.push_back(buffer);
  return BufferId(static_cast<int32_t>(plan_.roles[0].buffers.size()) - 1);
}

BufferId Bench::add_pool(const std::string& name, int64_t elements) {
  Buffer b;
  b.name = name;
  b.type = typed(tensor({elements}));
  b.kind = BufferClass::kOther;
  b.persistent = true;
  return add_buffer(b);
}

BufferId Bench::window(BufferId pool, int64_t& cursor, const Type& type) {
  const int64_t size = rounded(type.shape.elements()), all = type_of(pool).shape.elements();
  SHARDLAB_CHECK(size <= all, "an operand of {} elements in a pool of {}", size, all);
  if (cursor + size > all) cursor = 0;
  Buffer b;
  b.type = type;
  b.kind = BufferClass::kOther;
  b.persistent = true;
  b.view = View{pool.value, cursor, {}};
  cursor += size;
  return add_buffer(b);
}

BufferId Bench::cold(const Type& type) { return window(inputs_, input_cursor_, type); }

BufferId Bench::warm(const Type& type) {
  const BufferId from = cold(type), to = cold(type);
  pending_.push_back({from, to});
  return to;
}

BufferId Bench::result(const Type& type) { return window(results_, result_cursor_, type); }

BufferId Bench::passing(const Type& type) {
  if (passing_cursor_ + rounded(type.shape.elements()) > kPassingElements) passing_cursor_ = 0;
  return window(passing_, passing_cursor_, type);
}

BufferId Bench::state(const Type& type) {
  Buffer b;
  b.type = type;
  b.kind = BufferClass::kOther;
  b.persistent = true;
  return add_buffer(b);
}

BufferId Bench::drawn(const Type& type) {
  if (dtype_ == DType::f32) return cold(type);
  const BufferId from = cold(typed(type)), to = state(type);
  untested(Copy{}, {from}, {{to}});
  return to;
}

BufferId Bench::tokens(int64_t sequences, int64_t tokens) {
  const BufferId to = state(ids(sequences, tokens));
  op(LoadBatch{}, {}, {{to}});
  return to;
}

void Bench::op(Work work, const std::vector<BufferId>& reads, const std::vector<Write>& writes, int stream, int role) {
  std::vector<Item>& program = programs_[static_cast<size_t>(role)];
  for (const Copied& c : pending_) add_call("prepare", Copy{}, {c.from}, {{c.to}}, std::string(kPreparation), stream, program);
  pending_.clear();
  add_call("op", std::move(work), reads, writes, "op", stream, program);
}

void Bench::untested(Work work, const std::vector<BufferId>& reads, const std::vector<Write>& writes, int stream) {
  add_call("op", std::move(work), reads, writes, std::string(kPreparation), stream, programs_[0]);
}

void Bench::add_call(const std::string& name, Work work, const std::vector<BufferId>& reads, const std::vector<Write>& writes,
                     const std::string& label, int stream, std::vector<Item>& into) {
  Segment segment;
  segment.name = fmt::format("{} {}", name, plan_.segments.size());
  Op op;
  op.work = std::move(work);
  op.label = label;
  op.stream = StreamId(stream);
  op.strategy = "calibration";
  Call call;
  call.segment = SegmentId(static_cast<int32_t>(plan_.segments.size()));
  call.layer = call.micro_batch = 0;
  for (const BufferId b : reads) {
    op.reads.push_back(SlotId(static_cast<int32_t>(segment.slots.size())));
    add_slot(segment, type_of(b), plan_.roles[0].buffers[b.index()].kind);
    call.binding.push_back(b);
  }
  for (const Write& w : writes) {
    op.writes.push_back(SlotId(static_cast<int32_t>(segment.slots.size())));
    if (w.in_place < 0) {
      add_slot(segment, type_of(w.buffer), plan_.roles[0].buffers[w.buffer.index()].kind);
      call.binding.push_back(w.buffer);
      continue;
    }
    const Slot& read = segment.slots[static_cast<size_t>(w.in_place)];
    Slot& slot = add_slot(segment, read.type, read.cls);
    slot.view = View{w.in_place, 0, {}};
    if (w.shard) {
      slot.view->shard_axes = AxisSet::of(0);
      slot.type.shape[0] /= plan_.mesh.world_size();
      slot.type.place[0] = Placement::shard(0);
    }
    call.binding.emplace_back();
  }
  segment.steps.emplace_back(std::move(op));
  plan_.segments.push_back(std::move(segment));
  into.emplace_back(std::move(call));
}

CommId Bench::comm(const std::string& name) {
  plan_.comms.push_back({name, AxisSet::of(0), {}});
  return CommId(static_cast<int32_t>(plan_.comms.size()) - 1);
}

int Bench::add_stream(const std::string& name) {
  plan_.streams.push_back(name);
  return static_cast<int>(plan_.streams.size()) - 1;
}

Plan Bench::take() {
  for (size_t role = 0; role < programs_.size(); ++role) {
    plan_.roles[role].stage = static_cast<int>(role);
    plan_.roles[role].program = std::move(programs_[role]);
  }
  add_workspaces(plan_, false);
  return std::move(plan_);
}

}  // namespace shardlab::simulator
