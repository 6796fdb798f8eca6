#include "runtime/rank.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <map>
#include <thread>

#include "plan/base/check.h"
#include "plan/base/world_error.h"
#include "plan/collective_steps.h"
#include "plan/expert_places.h"
#include "plan/period.h"
#include "plan/rope_table.h"

namespace shardlab::runtime {

namespace {

size_t role_index(const Plan& plan, const Coordinates& at) { return static_cast<size_t>(plan.mesh.role_of(at)); }

/// The rank's NVMe space; what fails says whose it was to be.
std::unique_ptr<BlockStore> open_store(const RunOptions& options, int rank, int64_t bytes) {
  try {
    if (options.block_stores) return options.block_stores(rank, bytes);
    return open_file_store(options.nvme_directory.empty() ? "." : options.nvme_directory, bytes);
  } catch (const WorldError& e) { throw WorldError(fmt::format("rank {}: {}", rank, e.what()), e.hint()); }
}

}  // namespace

Rank::Rank(const PlacedPlan& placed, int rank, const RunOptions& options, std::unique_ptr<Backend> backend,
           const std::array<std::byte*, kSpaces>& storage, const Rank* beside)
    : placed_(placed),
      plan_(*placed.plan),
      rank_(rank),
      at_(plan_.mesh.coordinates(rank)),
      role_(plan_.roles[role_index(plan_, at_)]),
      program_(placed.programs[role_index(plan_, at_)]),
      layout_(placed.arenas[role_index(plan_, at_)]),
      options_(options),
      backend_(std::move(backend)),
      device_(backend_->device()),
      arena_(layout_.bytes, {.poison = options.poison, .reserve = backend_->has_storage(), .device = device_, .storage = storage}),
      is_beside_(beside != nullptr),
      counting_(plan_, role_, program_, options.rows_together) {
  if (const int64_t bytes = arena_.bytes(Space::kNvme); bytes > 0 && backend_->has_storage())
    store_ = is_beside_ ? beside->store_ : open_store(options_, rank, bytes);
  communicators_.resize(plan_.comms.size());
  sent_by_comm_.resize(plan_.comms.size());
  if (backend_->has_storage()) expert_rows_.resize(counting_.numbers());
  for (int m = 0; m < kMetrics; ++m) metric_buffers_[static_cast<size_t>(m)] = find(kMetricNames[static_cast<size_t>(m)]);
}

std::optional<BufferId> find_buffer(const Role& role, std::string_view name) {
  const auto found = std::ranges::find(role.buffers, name, &Buffer::name);
  if (found == role.buffers.end()) return std::nullopt;
  return BufferId(static_cast<int32_t>(found - role.buffers.begin()));
}

bool outlives_step(const Role& role, BufferId buffer) {
  const Buffer* b = &role.buffers[buffer.index()];
  while (b->view) b = &role.buffers[static_cast<size_t>(b->view->base)];
  return b->persistent;
}

int64_t Rank::offset_of(BufferId buffer) const {
  int64_t offset = 0;
  while (const auto& view = role_.buffers[buffer.index()].view) {
    const Type& type = role_.buffers[buffer.index()].type;
    offset += bytes_of(type.dtype, view->offset);
    if (!view->shard_axes.empty()) offset += plan_.mesh.index_in_group(view->shard_axes, at_) * type.bytes();
    buffer = BufferId(view->base);
  }
  return layout_.buffers[buffer.index()] + offset;
}

void* Rank::address(BufferId buffer) const { return arena_.at(role_.buffers[buffer.index()].space, offset_of(buffer)); }

int64_t Rank::offset_of(const Operand& operand) const {
  int64_t offset = operand.offset;
  if (!operand.shard_axes.empty()) offset += plan_.mesh.index_in_group(operand.shard_axes, at_) * operand.shard_stride;
  return offset + (operand.root ? layout_.buffers[operand.root.index()] : layout_.locals[static_cast<size_t>(operand.local)]);
}

Space Rank::space_of(const Operand& operand) const {
  return operand.root ? role_.buffers[operand.root.index()].space : program_.locals[static_cast<size_t>(operand.local)].space;
}

void* Rank::address(const Operand& operand) const { return arena_.at(space_of(operand), offset_of(operand)); }

// ---- binding

Result<void> Rank::bind(Transport& transport, const BatchSource* source) {
  const std::vector<int32_t> steps = steps_of_calls(plan_, role_);
  if (device_ != nullptr) {
    auto counts = host_counts(plan_, program_, counting_);
    if (!counts.ok()) return counts.error();
    host_counts_ = std::move(*counts);
    if (host_counts_.bytes > 0) count_bytes_ = device_->reserve(Space::kHost, host_counts_.bytes);
  }
  for (size_t s = 0; s < plan_.streams.size(); ++s) {
    streams_.push_back(std::make_unique<Stream>());
    streams_.back()->instructions.reserve(program_.streams[s].size());
    for (const int32_t id : program_.streams[s]) {
      const Instruction& instruction = program_.instructions[static_cast<size_t>(id)];
      BoundInstruction& bound = streams_.back()->instructions.emplace_back();
      bound.id = id;
      if (instruction.call >= 0) bound.step = steps[static_cast<size_t>(instruction.call)];
      bound.waits = program_.waits_of(instruction);
      if (instruction.kind == Instruction::Kind::kRun) {
        SHARDLAB_TRY(bind_run(instruction, bound, transport, source));
        bind_counts(instruction, bound);
      } else {
        bind_storage(instruction, bound);
      }
    }
  }
  if (device_ != nullptr) {
    settle_predicates();
    bind_events();
  }
  return {};
}

/// What an instruction has to do with counts that the host of a device reads.
void Rank::bind_counts(const Instruction& instruction, BoundInstruction& bound) {
  bound.makes = host_counts_.made_by(instruction.id);
  if (device_ != nullptr && moves_packed_rows(*instruction.op)) bound.awaits = host_counts_.read_by(instruction.id);
}

/// Counts that an instruction reads: where the processor that runs, or issues, it finds them. Null without storage.
const int32_t* Rank::host_counts_of(const Instruction& instruction, size_t read) const {
  if (device_ == nullptr) return static_cast<const int32_t*>(address(program_.reads(instruction)[read]));
  const auto reads = host_counts_.read_by(instruction.id);
  const auto found = std::ranges::find(reads, read, &CountRead::read);
  SHARDLAB_CHECK(found != reads.end(), "`{}` reads no counts that the host has", describe(plan_, instruction));
  return reinterpret_cast<const int32_t*>(count_bytes_ + host_counts_.copies[static_cast<size_t>(found->copy)].offset);
}

/// Many updates of a step hang on one word: where it is written once, before all of them, each stream fetches it once.
void Rank::settle_predicates() {
  std::map<const void*, std::vector<int32_t>> writers;  // of each predicate, by instruction
  for (const auto& stream : streams_)
    for (const BoundInstruction& bound : stream->instructions)
      if (bound.predicate != nullptr) writers[bound.predicate];
  if (writers.empty()) return;
  for (const Instruction& i : program_.instructions)
    if (i.kind == Instruction::Kind::kRun)
      for (const Operand& o : program_.writes(i))
        if (const auto found = writers.find(address(o)); found != writers.end()) found->second.push_back(i.id);
  for (const auto& stream : streams_)
    for (BoundInstruction& bound : stream->instructions)
      if (bound.predicate != nullptr) {
        const std::vector<int32_t>& ids = writers[bound.predicate];
        bound.settled = ids.size() == 1 && ids.front() < bound.id;
      }
}

/// Puts the stream program's waits and records to the instructions.
void Rank::bind_events() {
  stream_program_ = stream_program(plan_, program_, {.poison = options_.poison});
  for (const auto& stream : streams_)
    for (BoundInstruction& bound : stream->instructions) {
      const StreamAction& action = stream_program_.actions[static_cast<size_t>(bound.id)];
      bound.events = stream_program_.waits_of(action);
      bound.record = action.record;
    }
  const bool times = options_.tracer != nullptr && options_.tracer->wants_events();
  device_->prepare({.streams = static_cast<int>(plan_.streams.size()),
                    .events = stream_program_.events + host_counts_.events,
                    .marks = times ? 1 + 2 * static_cast<int>(program_.instructions.size()) : 0});
  host_bytes_ = device_->reserve(Space::kHost, static_cast<int64_t>(own_bytes_.size()));
}

Result<void> Rank::bind_run(const Instruction& instruction, BoundInstruction& bound, Transport& transport,
                            const BatchSource* source) {
  if (instruction.predicate)
    bound.predicate =
        static_cast<const int32_t*>(address(program_.operands[instruction.first_operand + instruction.reads + instruction.writes]));
  const Work& work = instruction.op->work;
  if (const auto* w = std::get_if<Collective>(&work)) return bind_collective(instruction, *w, bound, transport);
  if (const auto* w = std::get_if<Send>(&work)) return bind_message(instruction, w->comm, w->hop, w->cyclic, bound, transport);
  if (const auto* w = std::get_if<Recv>(&work)) return bind_message(instruction, w->comm, w->hop, w->cyclic, bound, transport);
  bound.on_host = true;
  for (const auto operands : {program_.reads(instruction), program_.writes(instruction)})
    for (const Operand& o : operands) bound.on_host = bound.on_host && space_of(o) != Space::kDevice;
  for (const auto operands : {program_.reads(instruction), program_.writes(instruction)})
    for (const Operand& o : operands)
      if (space_of(o) == Space::kNvme && backend_->has_storage()) return bind_block(instruction, bound);
  BoundOp op;
  op.on_host = bound.on_host;
  op.plan = &plan_;
  op.instruction = &instruction;
  op.rank = rank_;
  op.at = at_;
  op.seed = options_.seed;
  op.source = source;
  for (const Operand& o : program_.reads(instruction)) op.reads.push_back(tensor(o));
  for (const Operand& o : program_.writes(instruction)) op.writes.push_back(tensor(o));
  bind_workspace(op);
  for (const auto operands : {program_.reads(instruction), program_.writes(instruction)})
    for (const Operand& o : operands)
      if (op.parameter < 0 && o.root) op.parameter = role_.buffers[o.root.index()].parameter;
  auto launch = backend_->bind(op);
  if (!launch.ok()) return launch.error();
  bound.kind = BoundInstruction::Kind::kLaunch;
  bound.launch = std::move(launch).value();
  if (const int layer = counting_.of(instruction); layer >= 0 && !expert_rows_.empty()) {
    bound.counts = host_counts_of(instruction, RowCounting::read_of(instruction));
    bound.layer = layer, bound.micro_batch = instruction.micro_batch;
  }
  return {};
}

/// A copy between host memory and the rank's store. Buffers in host memory take whole blocks of their arena: where both ends begin
/// and end with their buffers, what travels is whole blocks too.
Result<void> Rank::bind_block(const Instruction& instruction, BoundInstruction& bound) {
  const Operand& from = program_.reads(instruction)[0];
  const Operand& to = program_.writes(instruction)[0];
  const bool reads = space_of(from) == Space::kNvme;
  const Operand& memory = reads ? to : from;
  if (!std::holds_alternative<Copy>(instruction.op->work) || space_of(memory) != Space::kHost || from.type->dtype != to.type->dtype)
    return Error{ExitCode::kUsage,
                 fmt::format("`{}` is no plain copy between host memory and NVMe, and nothing else reaches a drive",
                             describe(plan_, instruction)),
                 "copy to a buffer in host memory first", ""};
  bound.kind = reads ? BoundInstruction::Kind::kBlockRead : BoundInstruction::Kind::kBlockWrite;
  bound.call.source = bound.call.target = address(memory);
  bound.offset = offset_of(reads ? from : to);
  const auto whole = [&](const Operand& o) {
    return o.root && o.offset == 0 && o.bytes == role_.buffers[o.root.index()].type.bytes();
  };
  bound.bytes = whole(from) && whole(to) ? whole_blocks(from.bytes) : from.bytes;
  return {};
}

std::optional<BufferId> Rank::find_workspace(const Instruction& instruction) const {
  return find(fmt::format("workspace.{}", plan_.streams[static_cast<size_t>(instruction.stream)]));
}

std::span<std::byte> Rank::workspace_of(const Instruction& instruction) const {
  const auto id = find_workspace(instruction);
  if (!id) return {};
  return {static_cast<std::byte*>(address(*id)), static_cast<size_t>(role_.buffers[id->index()].type.bytes())};
}

void Rank::bind_workspace(BoundOp& op) const {
  if (const auto id = find_workspace(*op.instruction))
    if (device_ == nullptr || (role_.buffers[id->index()].space == Space::kHost) == op.on_host)
      op.workspace = workspace_of(*op.instruction);
  if (const auto base = rope_base(op.op())) {
    const auto own = find(rope_table_of(*base)), table = own ? own : find(kRopeTable);
    if (table) op.rope_table = static_cast<float*>(address(*table));
  }
  if (const auto table = find(kExpertPlaces))
    if (const auto at = expert_places_at(plan_, role_, op.instruction->layer))
      op.expert_places = static_cast<int32_t*>(address(*table)) + *at;
}

Communicator& Rank::communicator(CommId comm, Transport& transport) {
  auto& handle = communicators_[comm.index()];
  if (!handle) handle = transport.join(rank_, comm, group_of(plan_.mesh, plan_.comms[comm.index()], rank_));
  return *handle;
}

Result<void> Rank::bind_collective(const Instruction& instruction, const Collective& work, BoundInstruction& bound,
                                   Transport& transport) {
  bound.kind = BoundInstruction::Kind::kCollective;
  bound.comm = &communicator(work.comm, transport);
  bound.comm_id = work.comm.value;
  const Operand& source = program_.reads(instruction)[0];
  const Operand& target = program_.writes(instruction)[0];
  const bool packed = moves_packed_rows(*instruction.op);
  if (program_.reads(instruction).size() > 1 && !packed)
    return Error{
        ExitCode::kUsage,
        fmt::format("`{}` moves as many rows as a buffer says, which this transport does not", describe(plan_, instruction)),
        "give the counts of both sides, or predict the plan with mode: simulate", ""};
  const Type& whole = *(work.kind == CollectiveKind::kAllGather ? target : source).type;
  const int64_t strips = strips_of(plan_.mesh, plan_.comms[work.comm.index()], work.kind, *source.type, *target.type);
  bound.call = {work.kind, work.reduce,     work.algorithm,  whole.dtype, whole.shape.elements(),
                work.root, address(source), address(target), strips,      work.per_node};
  if (packed) {
    bound.call.elements = std::min(source.type->shape.elements(), target.type->shape.elements());
    bound.call.sent = host_counts_of(instruction, 1);
    bound.call.received = host_counts_of(instruction, 2);
    bound.call.counts = program_.reads(instruction)[1].type->shape.elements() / bound.comm->size();
    bound.call.row_bytes = bytes_of(source.type->dtype, source.type->shape.last());
    bound.call.source_room = rows_of(*source.type);
    bound.call.room = rows_of(*target.type);
    bound.call.levels = row_levels(*instruction.segment, *instruction.op);
    if (bound.call.levels && device_ != nullptr)
      return Error{ExitCode::kUsage,
                   fmt::format("`{}` moves rows by node, and on GPUs they go from rank to rank", describe(plan_, instruction)),
                   "lower the case with backend: cuda", ""};
    if (bound.call.levels) bound.call.stage = workspace_of(instruction);
    if (bound.call.levels && bound.call.levels->once) {
      const Operand& choice = program_.reads(instruction)[3];
      bound.call.choice = {static_cast<const int32_t*>(address(choice)), static_cast<size_t>(choice.type->shape.elements())};
      bound.call.top_k = choice.type->shape.last();
      bound.call.experts = program_.reads(instruction)[1].type->shape.last();
      if (bound.call.levels->weighed) {
        bound.call.weights = static_cast<const float*>(address(program_.reads(instruction)[4]));
        bound.call.tokens = address(program_.reads(instruction)[5]);
      }
    }
  }
  const auto prepared = bound.comm->prepare(bound.call);
  if (!prepared.ok()) {
    Error error = prepared.error();
    error.message = fmt::format("`{}`: {}", describe(plan_, instruction), error.message);
    return error;
  }
  return {};
}

Result<void> Rank::bind_message(const Instruction& instruction, CommId comm, int hop, bool cyclic, BoundInstruction& bound,
                                Transport& transport) {
  const bool sends = std::holds_alternative<Send>(instruction.op->work);
  bound.kind = sends ? BoundInstruction::Kind::kSend : BoundInstruction::Kind::kReceive;
  bound.comm = &communicator(comm, transport);
  bound.comm_id = comm.value;
  const int size = bound.comm->size();
  int peer = bound.comm->index() + hop;
  if (cyclic) peer = ((peer % size) + size) % size;
  SHARDLAB_CHECK(peer >= 0 && peer < size && peer != bound.comm->index(), "`{}` on rank {} reaches group index {} of {}",
                 describe(plan_, instruction), rank_, peer, size);
  bound.peer = peer;
  const Operand& operand = sends ? program_.reads(instruction)[0] : program_.writes(instruction)[0];
  bound.bytes = operand.bytes;
  bound.call.source = bound.call.target = address(operand);
  return {};
}

void Rank::bind_storage(const Instruction& instruction, BoundInstruction& bound) {
  const bool allocates = instruction.kind == Instruction::Kind::kAlloc;
  bound.kind = allocates ? BoundInstruction::Kind::kAlloc : BoundInstruction::Kind::kFree;
  if (instruction.local >= 0) {
    const LocalBuffer& local = program_.locals[static_cast<size_t>(instruction.local)];
    bound.space = local.space;
    bound.cls = local.cls;
    bound.offset = layout_.locals[static_cast<size_t>(instruction.local)];
    bound.bytes = instruction.segment->slots[local.slot.index()].type.bytes();
    return;
  }
  const Buffer& buffer = role_.buffers[instruction.buffer.index()];
  bound.space = buffer.space;
  bound.cls = buffer.kind;
  bound.offset = layout_.buffers[instruction.buffer.index()];
  bound.bytes = buffer.type.bytes();
  for (int m = 0; m < kMetrics; ++m)
    if (!allocates && metric_buffers_[static_cast<size_t>(m)] == instruction.buffer) bound.metric = m;
}

// ---- running

std::vector<int> Rank::streams() const {
  std::vector<int> used{0};
  for (size_t s = 1; s < streams_.size(); ++s)
    if (!streams_[s]->instructions.empty()) used.push_back(static_cast<int>(s));
  return used;
}

void Rank::enter(int stream) {
  if (device_ != nullptr) device_->attach_thread();
  if (stream == 0) enter_arena();
  backend_->enter_thread(stream);
}

void Rank::enter_arena() {
  if (!is_beside_) arena_.touch();
  for (size_t i = 0; i < role_.buffers.size(); ++i) {
    const Buffer& b = role_.buffers[i];
    if (!b.persistent || b.view) continue;
    ledger_.allocate(b.space, b.kind, b.type.bytes());
    if (is_beside_ && outlives_steps(b)) continue;
    arena_.allocate(b.space, layout_.buffers[i], b.type.bytes());
    std::byte* p = arena_.at(b.space, layout_.buffers[i]);
    if (p == nullptr) continue;
    if (device_ != nullptr)
      device_->fill(p, 0, b.type.bytes(), 0);
    else
      std::memset(p, 0, static_cast<size_t>(b.type.bytes()));
  }
  if (device_ != nullptr) device_->synchronise();
}

void Rank::take_arena() {
  for (size_t i = 0; i < role_.buffers.size(); ++i) {
    const Buffer& b = role_.buffers[i];
    if (b.persistent && !b.view && !outlives_steps(b)) arena_.allocate(b.space, layout_.buffers[i], b.type.bytes());
  }
  if (device_ != nullptr) device_->synchronise();  // other streams write there in the next step
}

void Rank::read(BufferId buffer, int64_t offset, std::span<std::byte> to) const {
  if (role_.buffers[buffer.index()].space == Space::kNvme) return store_->read(offset_of(buffer) + offset, to);
  const std::byte* from = static_cast<const std::byte*>(address(buffer)) + offset;
  if (device_ == nullptr) {
    std::memcpy(to.data(), from, to.size());
    return;
  }
  device_->attach_thread();
  device_->copy(to.data(), from, static_cast<int64_t>(to.size()), 0);
  device_->synchronise();
}

void Rank::write(BufferId buffer, int64_t offset, std::span<const std::byte> from) {
  if (role_.buffers[buffer.index()].space == Space::kNvme) return store_->write(offset_of(buffer) + offset, from);
  std::byte* to = static_cast<std::byte*>(address(buffer)) + offset;
  if (device_ == nullptr) {
    std::memcpy(to, from.data(), from.size());
    return;
  }
  device_->attach_thread();
  device_->copy(to, from.data(), static_cast<int64_t>(from.size()), 0);
  device_->synchronise();
}

void Rank::reset() {
  for (const auto& s : streams_) {
    s->completed.reset();
    s->end = 0;
    s->fetched = nullptr;
  }
  std::ranges::fill(sent_by_comm_, 0);
  std::ranges::fill(expert_rows_, 0);
  metric_kept_ = {};
}

void Rank::run(int stream, const StepFrame& frame, Task& task) {
  Stream& s = *streams_[static_cast<size_t>(stream)];
  const Clock& clock = *options_.clock;
  for (const BoundInstruction& bound : s.instructions) {
    task.set_instruction(bound.id);
    task.pause();
    if (device_ != nullptr) {
      issue(bound, stream, frame, task);
    } else {
      if (!bound.waits.empty()) await(bound, stream, frame, task);
      if (!skipped(bound, stream, task)) run_one(bound, stream, frame, task);
    }
    s.completed.advance();
  }
  task.set_instruction(-1);
  if (device_ != nullptr) await_idle(stream, task);
  s.end = clock.now() - frame.begin;
}

void Rank::carry_out(const BoundInstruction& bound, int stream, const StepFrame& frame, Task& task) {
  if (frame.number < 0)
    perform(bound, frame.states.front(), task);
  else
    run_one(bound, stream, frame, task);
}

void Rank::note(const BoundInstruction& bound, int stream, const StepFrame& frame, double begin, const Moved& moved) {
  if (options_.recorder != nullptr) record(TraceEvent::Kind::kOp, bound, stream, frame, begin, options_.clock->now(), moved);
}

/// Performs an instruction; a recorder is told of it.
Moved Rank::run_one(const BoundInstruction& bound, int stream, const StepFrame& frame, Task& task) {
  const StepState& state = frame.states[static_cast<size_t>(bound.step)];
  if (options_.recorder == nullptr) return perform(bound, state, task);
  const double begin = options_.clock->now();
  const Moved moved = perform(bound, state, task);
  record(TraceEvent::Kind::kOp, bound, stream, frame, begin, options_.clock->now(), moved);
  return moved;
}

/// Whether a predicate says that the instruction does not run. On a device that costs a round trip: its value decides what the host
/// issues.
bool Rank::skipped(const BoundInstruction& bound, int stream, Task& task) {
  if (bound.predicate == nullptr) return false;
  if (device_ == nullptr) return *bound.predicate == 0;
  Stream& s = *streams_[static_cast<size_t>(stream)];
  if (s.fetched == bound.predicate) return !s.runs;
  std::byte* const value = host_bytes_ + 8 * (kMetrics + stream);
  device_->copy(value, bound.predicate, sizeof(int32_t), stream);
  await_idle(stream, task);
  int32_t runs = 0;
  std::memcpy(&runs, value, sizeof runs);
  if (bound.settled) {
    s.fetched = bound.predicate;
    s.runs = runs != 0;
  }
  return runs == 0;
}

// ---- on a device

/// Whether the work of an instruction is given to the device by this rank.
bool Rank::issues(const BoundInstruction& bound) {
  switch (bound.kind) {
    case BoundInstruction::Kind::kCollective: return bound.comm->issues(CommCall::kCollective);
    case BoundInstruction::Kind::kSend: return bound.comm->issues(CommCall::kSend);
    case BoundInstruction::Kind::kReceive: return bound.comm->issues(CommCall::kReceive);
    default: return true;
  }
}

/// Gives an instruction to the device: its waits, its work, its event.
void Rank::issue(const BoundInstruction& bound, int stream, const StepFrame& frame, Task& task) {
  await_events(bound, stream, task);
  if (bound.on_host) await_idle(stream, task);  // its operands are complete
  await_counts(bound, task);
  if (!skipped(bound, stream, task)) {
    const bool book_keeping = bound.kind == BoundInstruction::Kind::kAlloc || bound.kind == BoundInstruction::Kind::kFree;
    DeviceTracer* const tracer = book_keeping ? nullptr : options_.tracer;
    const bool timed = tracer != nullptr && tracer->wants_events();
    const OpKey key{frame.number, rank_, bound.id};
    const double now = tracer != nullptr ? options_.clock->now() : 0;
    if (tracer != nullptr && !issues(bound)) {
      const Moved moved = run_one(bound, stream, frame, task);
      tracer->op_carried(key, {frame.number, moved.carrier_rank, moved.carrier_instruction}, now);
    } else {
      if (tracer != nullptr) tracer->begin_op(key, now);
      if (timed && !bound.on_host) device_->mark(mark_of(bound), stream);
      run_one(bound, stream, frame, task);
      if (tracer != nullptr && bound.on_host)
        tracer->op_timed(key, 1e3 * (now - frame.begin), 1e3 * (options_.clock->now() - frame.begin));
      if (timed && !bound.on_host) {
        device_->mark(mark_of(bound) + 1, stream);
        marked_[static_cast<size_t>(bound.id)] = 1;
      }
      if (tracer != nullptr) tracer->end_op(key);
    }
    fetch_counts(bound, stream, frame);
  }
  if (bound.record >= 0) device_->record(bound.record, stream);
}

/// An event must be recorded before it is waited for: so the host waits until the other stream's thread has come past it.
void Rank::await_events(const BoundInstruction& bound, int stream, Task& task) {
  for (const EventWait& w : bound.events) {
    task.wait(streams_[static_cast<size_t>(w.stream)]->completed, static_cast<uint64_t>(w.count),
              {WaitCause::Kind::kStream, w.stream, w.count});
    device_->wait(w.event, stream);
  }
}

/// Returns once `done` says so of the device. Asks ever more rarely, so that the asking costs less than a hundredth of the step and what it
/// adds to the step's time is less than that too.
template <class Done>
void Rank::await_device(Task& task, const Done& done) {
  const double begin = task.now();
  while (!done()) {
    task.pause();
    const double waited = task.now() - begin;
    if (waited > options_.timeout_s)
      throw WorldError(fmt::format("the device has worked for {:.3g} s, which is the limit{}", waited, progress()),
                       "raise the time-out (measure.timeout) if a step may really take so long");
    if (waited > 1e-4) std::this_thread::sleep_for(std::chrono::duration<double>(std::min(waited / 200, 1e-3)));
  }
}

/// Returns once the device has run what the stream was given.
void Rank::await_idle(int stream, Task& task) {
  await_device(task, [&] { return device_->idle(stream); });
}

/// Returns once the host has the counts by which the instruction's rows are cut into messages. The op that makes them was issued before:
/// the instruction is ordered behind it.
void Rank::await_counts(const BoundInstruction& bound, Task& task) {
  for (const CountRead& read : bound.awaits) {
    const int32_t event = stream_program_.events + host_counts_.copies[static_cast<size_t>(read.copy)].event;
    await_device(task, [&] { return device_->reached(event); });
  }
}

/// Copies counts that the instruction has made to the host, in the stream's order.
void Rank::fetch_counts(const BoundInstruction& bound, int stream, const StepFrame& frame) {
  if (bound.makes.empty()) return;
  const OpKey key{frame.number, rank_, bound.id};
  if (options_.tracer != nullptr) options_.tracer->begin_aside(key);
  const Instruction& maker = program_.instructions[static_cast<size_t>(bound.id)];
  for (const CountCopy& copy : bound.makes) {
    device_->copy(count_bytes_ + copy.offset, address(program_.writes(maker)[copy.write]), copy.bytes, stream);
    if (copy.event >= 0) device_->record(stream_program_.events + copy.event, stream);
  }
  if (options_.tracer != nullptr) options_.tracer->end_op(key);
}

/// How far the device has come, for messages: what each stream that still works has come past.
std::string Rank::progress() const {
  std::string text;
  for (const int stream : streams()) {
    if (device_->idle(stream)) continue;
    const Stream& s = *streams_[static_cast<size_t>(stream)];
    const size_t issued = static_cast<size_t>(s.completed.value());
    const BoundInstruction* last = nullptr;
    for (size_t i = 0; i < issued; ++i)  // what is not issued yet may have been reached in the step before
      if (const BoundInstruction& bound = s.instructions[i]; bound.record >= 0 && device_->reached(bound.record)) last = &bound;
    text += fmt::format(
        "\nstream {} has come past {}", plan_.streams[static_cast<size_t>(stream)],
        last == nullptr ? "none of its events"
                        : fmt::format("#{} `{}`", last->id, describe(plan_, program_.instructions[static_cast<size_t>(last->id)])));
    if (issued < s.instructions.size()) text += fmt::format(", and {} more are not issued", s.instructions.size() - issued);
  }
  return text;
}

void Rank::mark_begin() {
  if (device_ == nullptr || options_.tracer == nullptr || !options_.tracer->wants_events()) return;
  marked_.assign(program_.instructions.size(), 0);
  device_->attach_thread();
  device_->mark(0, 0);
}

void Rank::report_times(int32_t step) {
  for (size_t i = 0; i < marked_.size(); ++i) {
    if (marked_[i] == 0) continue;
    const int mark = 1 + 2 * static_cast<int>(i);
    options_.tracer->op_timed({step, rank_, static_cast<int32_t>(i)}, device_->milliseconds(0, mark),
                              device_->milliseconds(0, mark + 1));
  }
}

// ---- on the processor

/// Waits until the other streams are where the instruction needs them; a wait that was there to see is recorded.
void Rank::await(const BoundInstruction& bound, int stream, const StepFrame& frame, Task& task) {
  const auto ready = [&](const Wait& w) {
    return streams_[static_cast<size_t>(w.stream)]->completed.value() >= static_cast<uint64_t>(w.count);
  };
  if (std::ranges::all_of(bound.waits, ready)) return;
  const double begin = options_.recorder == nullptr ? 0 : options_.clock->now();
  for (const Wait& w : bound.waits)
    task.wait(streams_[static_cast<size_t>(w.stream)]->completed, static_cast<uint64_t>(w.count),
              {WaitCause::Kind::kStream, w.stream, w.count});
  if (options_.recorder != nullptr) record(TraceEvent::Kind::kWait, bound, stream, frame, begin, options_.clock->now(), {});
}

Moved Rank::perform(const BoundInstruction& bound, const StepState& state, Task& task) {
  using Kind = BoundInstruction::Kind;
  Moved moved;
  switch (bound.kind) {
    case Kind::kLaunch:
      bound.launch(state);
      if (bound.counts != nullptr && device_ == nullptr) count_rows(bound);
      return moved;
    case Kind::kBlockRead:
      task.aside([&] {
        store_->read(bound.offset, {static_cast<std::byte*>(bound.call.target), static_cast<size_t>(bound.bytes)});
      });
      return moved;
    case Kind::kBlockWrite:
      task.aside([&] {
        store_->write(bound.offset, {static_cast<const std::byte*>(bound.call.source), static_cast<size_t>(bound.bytes)});
      });
      return moved;
    case Kind::kCollective: moved = bound.comm->collective(bound.call, task); break;
    case Kind::kSend: moved = bound.comm->send(bound.call.source, bound.bytes, bound.peer, task); break;
    case Kind::kReceive: moved = bound.comm->receive(bound.call.target, bound.bytes, bound.peer, task); break;
    case Kind::kAlloc:
      arena_.allocate(bound.space, bound.offset, bound.bytes);
      ledger_.allocate(bound.space, bound.cls, bound.bytes);
      return moved;
    case Kind::kFree:
      if (bound.metric >= 0 && backend_->has_storage()) keep_metric(bound.metric);
      arena_.free(bound.space, bound.offset, bound.bytes);
      ledger_.free(bound.space, bound.cls, bound.bytes);
      return moved;
  }
  count_sent(bound.comm_id, moved.sent_bytes);
  return moved;
}

void Rank::record(TraceEvent::Kind kind, const BoundInstruction& bound, int stream, const StepFrame& frame, double begin,
                  double end, const Moved& moved) {
  TraceEvent event;
  event.kind = kind;
  event.rank = rank_;
  event.instruction = bound.id;
  event.stream = stream;
  event.step = frame.number;
  event.begin = begin - frame.begin;
  event.end = end - frame.begin;
  event.peer_wait = moved.peer_wait_s;
  event.sent_bytes = moved.sent_bytes;
  options_.recorder->record(event);
}

double Rank::end_of_step() const {
  double end = 0;
  for (const auto& s : streams_) end = std::max(end, s->end);
  return end;
}

/// Adds what the counts say to the rows of the layer's experts. The ops of a layer run on one stream.
void Rank::count_rows(const BoundInstruction& bound) {
  const CountedLayer& layer = counting_.layers()[static_cast<size_t>(bound.layer)];
  add_rows(bound.counts, layer, bound.micro_batch, std::span(expert_rows_).subspan(layer.first, layer.numbers()));
}

void Rank::count_rows_of_step() {
  if (device_ == nullptr) return;
  for (const auto& stream : streams_)
    for (const BoundInstruction& bound : stream->instructions)
      if (bound.counts != nullptr) count_rows(bound);
}

/// Copies a metric out of its buffer, in the order of stream 0.
void Rank::keep_metric(int which) {
  const BufferId buffer = *metric_buffers_[static_cast<size_t>(which)];
  const int64_t bytes = bytes_of(role_.buffers[buffer.index()].type.dtype, 1);
  std::byte* to = host_bytes_ + 8 * which;
  if (device_ != nullptr)
    device_->copy(to, address(buffer), bytes, 0);
  else
    std::memcpy(to, address(buffer), static_cast<size_t>(bytes));
  metric_kept_[static_cast<size_t>(which)] = true;
}

std::optional<double> Rank::metric(int which, int step) const {
  const size_t m = static_cast<size_t>(which);
  if (!metric_buffers_[m] || !backend_->has_storage()) return std::nullopt;
  const Type& type = role_.buffers[metric_buffers_[m]->index()].type;
  const DType dtype = type.dtype;
  std::array<std::byte, 8> value{};
  const size_t bytes = static_cast<size_t>(bytes_of(dtype, 1));
  if (metric_kept_[m])
    std::memcpy(value.data(), host_bytes_ + 8 * which, bytes);
  else if (persistent(*metric_buffers_[m]))
    read(*metric_buffers_[m], bytes_of(dtype, std::min<int64_t>(step, type.shape.elements() - 1)), std::span(value).first(bytes));
  else
    return std::nullopt;
  if (dtype == DType::f64) return std::bit_cast<double>(value);
  float f = 0;
  std::memcpy(&f, value.data(), sizeof f);
  return f;
}

}  // namespace shardlab::runtime
