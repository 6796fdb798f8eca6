#include "tests/cuda_runtime/moving_nccl.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "tests/cuda_runtime/host_kernels.h"
#include "tests/namespaces.h"

namespace shardlab::testing {

using cuda::NcclHandle;
using cuda::NcclStatus;
using cuda::StreamHandle;

std::string MovingNccl::fault() const {
  const std::lock_guard lock(mutex_);
  return fault_;
}

int64_t MovingNccl::messages() const {
  const std::lock_guard lock(mutex_);
  return messages_;
}

void MovingNccl::failed(std::string_view kernel, std::string_view, int, std::string_view text) {
  const std::lock_guard lock(mutex_);
  fault_ = fmt::format("{}: {}", kernel, text);
}

NcclStatus MovingNccl::unique_id(cuda::NcclId* id) {
  const std::lock_guard lock(mutex_);
  ++ids_;
  std::memcpy(id->bytes.data(), &ids_, sizeof ids_);
  return 0;
}

NcclStatus MovingNccl::init(NcclHandle* handle, int size, const cuda::NcclId& id, int index) {
  const std::lock_guard lock(mutex_);
  int number = 0;
  std::memcpy(&number, id.bytes.data(), sizeof number);
  auto& communicator = communicators_[number];
  if (!communicator) communicator = std::make_shared<Communicator>();
  communicator->size = size;
  handles_.push_back(std::make_unique<Handle>());
  handles_.back()->communicator = communicator;
  handles_.back()->index = index;
  handle->value = handles_.back().get();
  return 0;
}

NcclStatus MovingNccl::group_start() {
  const std::lock_guard lock(mutex_);
  ++groups_[std::this_thread::get_id()].depth;
  return 0;
}

NcclStatus MovingNccl::group_end() {
  std::vector<Pending> calls;
  {
    const std::lock_guard lock(mutex_);
    Group& group = groups_[std::this_thread::get_id()];
    if (--group.depth > 0) return 0;
    calls.swap(group.calls);
  }
  issue(std::move(calls));
  return 0;
}

/// A call belongs to its thread's group, or is one by itself.
NcclStatus MovingNccl::submit(Pending call) {
  {
    const std::lock_guard lock(mutex_);
    Group& group = groups_[std::this_thread::get_id()];
    if (group.depth > 0) {
      group.calls.push_back(std::move(call));
      return 0;
    }
  }
  std::vector<Pending> alone;
  alone.push_back(std::move(call));
  issue(std::move(alone));
  return 0;
}

/// The calls of a group begin together, and those that wait for a peer to have taken something end last. On the null stream, where they all
/// belong to one group, they are carried out here.
void MovingNccl::issue(std::vector<Pending> calls) {
  std::ranges::stable_partition(calls, [](const Pending& call) { return !call.sends; });
  const auto give = [](const Pending& call, const std::function<void()>& work, const std::function<bool()>& ready) {
    if (auto* stream = static_cast<FakeStream*>(call.stream.value))
      stream->push(work, ready);
    else
      work();
  };
  for (const Pending& call : calls) give(call, call.arrive, nullptr);
  for (const Pending& call : calls) give(call, call.run, call.ready);
}

void MovingNccl::reduce(const Round& round, int64_t begin, int64_t n, const std::vector<void*>& outs) {
  const int64_t at = bytes_of(round.dtype, begin);
  std::vector<const void*> parts;
  for (const auto& [source, target] : round.buffers) parts.push_back(static_cast<const std::byte*>(source) + at);
  host_kernels().combine({.parts = parts.data(),
                          .count = static_cast<int>(parts.size()),
                          .outs = outs.data(),
                          .out_count = static_cast<int>(outs.size()),
                          .n = n,
                          .dtype = round.dtype,
                          .maximum = round.reduce == ReduceOp::kMax},
                         {nullptr, this});
}

/// The collective for all ranks, by the first whose work runs once all have come.
void MovingNccl::carry_out(Round& round) {
  if (std::exchange(round.done, true)) return;
  const int64_t bytes = bytes_of(round.dtype, round.count);
  std::vector<void*> targets;
  for (const auto& [source, target] : round.buffers) targets.push_back(target);
  switch (round.kind) {
    case Kind::kAllReduce: return reduce(round, 0, round.count, targets);
    case Kind::kReduceScatter:
      for (size_t i = 0; i < targets.size(); ++i) reduce(round, static_cast<int64_t>(i) * round.count, round.count, {targets[i]});
      return;
    case Kind::kAllGather:
      for (size_t from = 0; from < targets.size(); ++from)
        for (void* to : targets)
          std::memmove(static_cast<std::byte*>(to) + static_cast<int64_t>(from) * bytes, round.buffers[from][0],
                       static_cast<size_t>(bytes));
      return;
    case Kind::kBroadcast:
      for (void* to : targets) std::memmove(to, round.buffers[static_cast<size_t>(round.root)][0], static_cast<size_t>(bytes));
      return;
  }
}

NcclStatus MovingNccl::meet(Round call, const void* source, void* target, NcclHandle handle, StreamHandle stream) {
  std::shared_ptr<Round> round;
  size_t size = 0;
  {
    const std::lock_guard lock(mutex_);
    Handle& own = *static_cast<Handle*>(handle.value);
    Communicator& communicator = *own.communicator;
    size = static_cast<size_t>(communicator.size);
    const size_t number = own.rounds++;
    if (communicator.rounds.size() <= number) {
      communicator.rounds.push_back(std::make_shared<Round>(call));
      communicator.rounds.back()->buffers.resize(size);
    }
    round = communicator.rounds[number];
    if (round->kind != call.kind || round->count != call.count || round->dtype != call.dtype)
      fault_ = fmt::format("ranks of a communicator meet in different collectives, number {}", number);
    round->buffers[static_cast<size_t>(own.index)] = {const_cast<void*>(source), target};
  }
  return submit({stream, [round] { ++round->arrived; }, [round, size] { return round->arrived == size; },
                 [this, round] { carry_out(*round); }});
}

NcclStatus MovingNccl::all_reduce(const void* source, void* target, int64_t count, DType dtype, ReduceOp reduce, NcclHandle handle,
                                  StreamHandle stream) {
  return meet({.kind = Kind::kAllReduce, .count = count, .dtype = dtype, .reduce = reduce}, source, target, handle, stream);
}
NcclStatus MovingNccl::reduce_scatter(const void* source, void* target, int64_t count, DType dtype, ReduceOp reduce,
                                      NcclHandle handle, StreamHandle stream) {
  return meet({.kind = Kind::kReduceScatter, .count = count, .dtype = dtype, .reduce = reduce}, source, target, handle, stream);
}
NcclStatus MovingNccl::all_gather(const void* source, void* target, int64_t count, DType dtype, NcclHandle handle,
                                  StreamHandle stream) {
  return meet({.kind = Kind::kAllGather, .count = count, .dtype = dtype}, source, target, handle, stream);
}
NcclStatus MovingNccl::broadcast(const void* source, void* target, int64_t count, DType dtype, int root, NcclHandle handle,
                                 StreamHandle stream) {
  return meet({.kind = Kind::kBroadcast, .count = count, .dtype = dtype, .root = root}, source, target, handle, stream);
}

std::shared_ptr<MovingNccl::Message> MovingNccl::message_of(Communicator& communicator, int from, int to, size_t number) {
  auto& all = communicator.messages[{from, to}];
  while (all.size() <= number) all.push_back(std::make_shared<Message>());
  return all[number];
}

NcclStatus MovingNccl::send(const void* source, int64_t count, DType dtype, int to, NcclHandle handle, StreamHandle stream) {
  std::shared_ptr<Message> message;
  {
    const std::lock_guard lock(mutex_);
    Handle& own = *static_cast<Handle*>(handle.value);
    message = message_of(*own.communicator, own.index, to, own.sent[to]++);
    messages_ += to != own.index;
  }
  const int64_t bytes = bytes_of(dtype, count);
  return submit({stream, [message, source, bytes] { message->source = source, message->bytes = bytes, message->here = true; },
                 [message] { return message->taken; }, [] {}, true});
}

NcclStatus MovingNccl::receive(void* target, int64_t count, DType dtype, int from, NcclHandle handle, StreamHandle stream) {
  std::shared_ptr<Message> message;
  {
    const std::lock_guard lock(mutex_);
    Handle& own = *static_cast<Handle*>(handle.value);
    message = message_of(*own.communicator, from, own.index, own.received[from]++);
  }
  const int64_t bytes = bytes_of(dtype, count);
  return submit({stream, [] {}, [message] { return message->here; },
                 [this, message, target, bytes] {
                   if (message->bytes != bytes) failed("receive", "nccl", 0, fmt::format("{} bytes for {}", message->bytes, bytes));
                   std::memmove(target, message->source, static_cast<size_t>(std::min(bytes, message->bytes)));
                   message->taken = true;
                 }});
}

}  // namespace shardlab::testing
