#include "runtime/cuda/nccl_transport.h"

#include <fmt/format.h>

#include <algorithm>

#include "plan/base/check.h"
#include "plan/base/world_error.h"
#include "plan/collective_steps.h"
#include "runtime/packed_rows.h"

namespace shardlab::runtime::cuda {

using Kind = NcclCall::Kind;

namespace {

size_t role_of(const Plan& plan, int rank) { return static_cast<size_t>(plan.mesh.role_of(rank)); }

}  // namespace

/// One rank's side.
class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(NcclTransport& transport, NcclTransport::Group& group, int index)
      : transport_(transport), group_(group), index_(index), rank_(group.ranks[static_cast<size_t>(index)]) {}

  int size() const override { return static_cast<int>(group_.ranks.size()); }
  int index() const override { return index_; }
  /// What NCCL cannot do was refused when the transport was made, from the plan itself.
  Result<void> prepare(const CollectiveCall&) override { return {}; }
  Moved collective(const CollectiveCall& call, Task& task) override;
  Moved send(const void* data, int64_t bytes, int to, Task& task) override;
  Moved receive(void* data, int64_t bytes, int from, Task& task) override;

 private:
  /// The turn of the task's instruction among the calls of its rank.
  const NcclOp& await_turn(Task& task);
  void end_turn() { order().issued.advance(); }
  void issue(const NcclCall& call, const void* source, void* target, StreamHandle stream);
  NcclTransport::Order& order() { return *transport_.orders_[static_cast<size_t>(rank_)]; }
  NcclHandle handle() const { return group_.handles[static_cast<size_t>(index_)]; }

  NcclTransport& transport_;
  NcclTransport::Group& group_;
  const int index_;
  const int rank_;
};

const NcclOp& NcclCommunicator::await_turn(Task& task) {
  NcclTransport::Order& o = order();
  const auto found = std::ranges::lower_bound(o.ops, task.instruction(), {}, &NcclOp::instruction);
  SHARDLAB_CHECK(found != o.ops.end() && found->instruction == task.instruction(), "instruction {} of rank {} makes no NCCL call",
                 task.instruction(), rank_);
  // The count of this step began at a multiple of the ops: a step ends with all of them issued.
  const uint64_t turn = o.issued.value() / o.ops.size() * o.ops.size() + static_cast<uint64_t>(found - o.ops.begin());
  task.wait(o.issued, turn, {WaitCause::Kind::kTurn, rank_, found->instruction});
  NcclStatus status = 0;
  transport_.check(transport_.nccl_.async_error(handle(), &status), "ncclCommGetAsyncError");
  transport_.check(status, "an earlier NCCL call");
  return *found;
}

/// Makes one call. `source` and `target` belong to the call itself.
void NcclCommunicator::issue(const NcclCall& call, const void* source, void* target, StreamHandle stream) {
  NcclApi& nccl = transport_.nccl_;
  const auto check = [&](NcclStatus status, std::string_view name) { transport_.check(status, name); };
  switch (call.kind) {
    case Kind::kGroupStart: return check(nccl.group_start(), "ncclGroupStart");
    case Kind::kGroupEnd: return check(nccl.group_end(), "ncclGroupEnd");
    case Kind::kAllReduce:
      return check(nccl.all_reduce(source, target, call.count, call.dtype, call.reduce, handle(), stream), "ncclAllReduce");
    case Kind::kReduceScatter:
      return check(nccl.reduce_scatter(source, target, call.count, call.dtype, call.reduce, handle(), stream), "ncclReduceScatter");
    case Kind::kAllGather: return check(nccl.all_gather(source, target, call.count, call.dtype, handle(), stream), "ncclAllGather");
    case Kind::kBroadcast:
      return check(nccl.broadcast(source, target, call.count, call.dtype, call.peer, handle(), stream), "ncclBroadcast");
    case Kind::kSend: return check(nccl.send(source, call.count, call.dtype, call.peer, handle(), stream), "ncclSend");
    case Kind::kReceive: return check(nccl.receive(target, call.count, call.dtype, call.peer, handle(), stream), "ncclRecv");
  }
}

Moved NcclCommunicator::collective(const CollectiveCall& call, Task& task) {
  const NcclOp& op = await_turn(task);
  const StreamHandle stream = transport_.stream(rank_, task.stream());
  const auto issue_all = [&](const std::vector<NcclCall>& calls) {
    for (const NcclCall& c : calls) issue(c, bytes_at(call.source, c.source), bytes_at(call.target, c.target), stream);
    end_turn();
  };
  Moved moved;
  if (op.counted && call.sent != nullptr) {
    issue_all(counted_calls(op.calls.front().comm, call, size(), index_, rank_));
    moved.sent_bytes = bytes_to_others(rows_sent(call, size(), rank_), index_);
    return moved;
  }
  issue_all(op.calls);
  moved.sent_bytes =
      sent_elements(call.kind, call.algorithm, call.elements, size(), index_, call.root, call.per_node) * bits_of(call.dtype) / 8;
  return moved;
}

Moved NcclCommunicator::send(const void* data, int64_t bytes, int to, Task& task) {
  for (const NcclCall& c : await_turn(task).calls) {
    SHARDLAB_CHECK(c.kind != Kind::kSend || (c.peer == to && c.count == bytes), "the plan sends {} bytes to {}, not {} to {}",
                   c.count, c.peer, bytes, to);
    issue(c, data, nullptr, transport_.stream(rank_, task.stream()));
  }
  end_turn();
  Moved moved;
  moved.sent_bytes = bytes;
  return moved;
}

Moved NcclCommunicator::receive(void* data, int64_t bytes, int from, Task& task) {
  for (const NcclCall& c : await_turn(task).calls) {
    SHARDLAB_CHECK(c.kind != Kind::kReceive || (c.peer == from && c.count == bytes),
                   "the plan receives {} bytes of {}, not {} of {}", c.count, c.peer, bytes, from);
    issue(c, nullptr, data, transport_.stream(rank_, task.stream()));
  }
  end_turn();
  return {};
}

// ---- the transport

Result<std::unique_ptr<NcclTransport>> NcclTransport::create(NcclApi& nccl, const PlacedPlan& placed, Node* node) {
  std::unique_ptr<NcclTransport> transport(new NcclTransport(nccl, placed, node));
  const Plan& plan = *placed.plan;
  for (int rank = 0; rank < plan.mesh.world_size(); ++rank) {
    auto ops = nccl_calls(plan, placed.programs[role_of(plan, rank)], rank);
    if (!ops.ok()) return ops.error();
    transport->orders_.push_back(std::make_unique<Order>());
    transport->orders_.back()->ops = std::move(*ops);
  }
  return transport;
}

NcclTransport::~NcclTransport() {
  if (aborted_) return;
  for (const auto& [key, group] : groups_)
    for (size_t i = 0; i < group->handles.size(); ++i) {
      if (group->handles[i].value == nullptr) continue;
      nccl_.destroy(group->handles[i]);  // what fails while all is torn down has no one left to tell
    }
}

void NcclTransport::abort() {
  const std::lock_guard lock(mutex_);
  if (std::exchange(aborted_, true)) return;
  for (const auto& [key, group] : groups_)
    for (const NcclHandle handle : group->handles)
      if (handle.value != nullptr) nccl_.abort(handle);
}

void NcclTransport::check(NcclStatus status, std::string_view call) const {
  if (status == 0) return;
  throw WorldError(fmt::format("{}: NCCL error {}: {}", call, status, nccl_.describe(status)),
                   "run again with NCCL_DEBUG=WARN in the environment for NCCL's own account");
}

void NcclTransport::attach(int rank) const {
  if (node_ != nullptr) node_->rank(rank).attach_thread();
}

StreamHandle NcclTransport::stream(int rank, int stream) const {
  return node_ != nullptr ? node_->rank(rank).stream(stream) : StreamHandle{};
}

std::unique_ptr<Communicator> NcclTransport::join(int rank, CommId comm, std::span<const int> members) {
  const auto self = std::ranges::find(members, rank);
  SHARDLAB_CHECK(self != members.end(), "rank {} joins a group that it is not in", rank);
  const std::lock_guard lock(mutex_);
  auto& slot = groups_[{comm.value, members.front()}];
  if (!slot) {
    slot = std::make_unique<Group>();
    slot->ranks.assign(members.begin(), members.end());
    slot->handles.resize(members.size());
    slot->joined.resize(members.size());
  }
  const int index = static_cast<int>(self - members.begin());
  slot->joined[static_cast<size_t>(index)] = true;
  if (slot->handles.front().value == nullptr && std::ranges::all_of(slot->joined, [](bool j) { return j; })) connect(comm, *slot);
  return std::make_unique<NcclCommunicator>(*this, *slot, index);
}

NcclHandle NcclTransport::handle(int rank, CommId comm) const {
  const auto members = group_of(placed_.plan->mesh, placed_.plan->comms[comm.index()], rank);
  const auto found = groups_.find({comm.value, members.front()});
  if (found == groups_.end()) return {};
  return found->second->handles[static_cast<size_t>(std::ranges::find(members, rank) - members.begin())];
}

/// One thread makes the handles of all members, as one group: made one by one, the first would wait for the second.
void NcclTransport::connect(CommId comm, Group& group) {
  std::vector<int> devices;
  if (node_ != nullptr)
    for (const int rank : group.ranks) devices.push_back(node_->rank(rank).device());
  const MemoryAccount::Taking taking(node_ != nullptr ? node_->account() : nullptr, MemoryUse::kCommunicators, devices);
  check(nccl_.unique_id(&group.id), "ncclGetUniqueId");
  check(nccl_.group_start(), "ncclGroupStart");
  for (size_t i = 0; i < group.ranks.size(); ++i) {
    attach(group.ranks[i]);
    check(nccl_.init(&group.handles[i], static_cast<int>(group.ranks.size()), group.id, static_cast<int>(i)), "ncclCommInitRank");
  }
  check(nccl_.group_end(), "ncclGroupEnd");
  warm_up(comm, group);
}

bool NcclTransport::uses(int rank, CommId comm, Kind kind, int peer) const {
  return std::ranges::any_of(orders_[static_cast<size_t>(rank)]->ops, [&](const NcclOp& op) {
    return std::ranges::any_of(op.calls, [&](const NcclCall& c) { return c.comm == comm && c.kind == kind && c.peer == peer; });
  });
}

/// One byte each way between members that send to each other, and a sum of one element where there are collectives.
void NcclTransport::warm_up(CommId comm, Group& group) {
  const int size = static_cast<int>(group.ranks.size());
  std::vector<std::byte*> bytes(group.ranks.size());
  for (size_t i = 0; i < bytes.size() && node_ != nullptr; ++i)
    bytes[i] = node_->rank(group.ranks[i]).reserve(Space::kDevice, kAlignment);
  const auto on_each = [&](const auto& call) {
    check(nccl_.group_start(), "ncclGroupStart");
    for (int i = 0; i < size; ++i) {
      attach(group.ranks[static_cast<size_t>(i)]);
      call(i);
    }
    check(nccl_.group_end(), "ncclGroupEnd");
  };
  const bool collects = std::ranges::any_of(std::initializer_list<Kind>{Kind::kAllReduce, Kind::kReduceScatter, Kind::kAllGather},
                                            [&](Kind kind) { return uses(group.ranks[0], comm, kind, -1); });
  const auto at = [&](int i) { return bytes[static_cast<size_t>(i)]; };
  const auto handle = [&](int i) { return group.handles[static_cast<size_t>(i)]; };
  if (collects)
    on_each([&](int i) { check(nccl_.all_reduce(at(i), at(i), 1, DType::f32, ReduceOp::kSum, handle(i), {}), "ncclAllReduce"); });
  on_each([&](int i) {
    for (int peer = 0; peer < size; ++peer) {
      if (uses(group.ranks[static_cast<size_t>(i)], comm, Kind::kSend, peer))
        check(nccl_.send(at(i), 1, DType::u8, peer, handle(i), {}), "ncclSend");
      if (uses(group.ranks[static_cast<size_t>(i)], comm, Kind::kReceive, peer))
        check(nccl_.receive(bytes_at(at(i), 32), 1, DType::u8, peer, handle(i), {}), "ncclRecv");
    }
  });
  for (const int rank : group.ranks) {
    if (node_ == nullptr) break;
    attach(rank);
    cuda::check(node_->api(), node_->api().synchronise_device(), "cudaDeviceSynchronize");
  }
}

}  // namespace shardlab::runtime::cuda
