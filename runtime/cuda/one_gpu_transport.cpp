#include "runtime/cuda/one_gpu_transport.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>

#include "plan/base/check.h"
#include "plan/base/world_error.h"
#include "plan/collective_steps.h"
#include "runtime/packed_rows.h"

namespace shardlab::runtime::cuda {

namespace {

bool combinable(DType t) { return gpu::is_activation_type(t) || t == DType::f64 || t == DType::i32 || t == DType::i64; }

/// One rank's side.
class OneGpuCommunicator final : public Communicator {
 public:
  OneGpuCommunicator(Node& node, Meeting& meeting, int index, std::vector<Handover*> to, std::vector<Handover*> from)
      : node_(node), meeting_(meeting), index_(index), to_(std::move(to)), from_(std::move(from)), check_(node.api()) {}

  int size() const override { return static_cast<int>(meeting_.ranks.size()); }
  int index() const override { return index_; }
  bool issues(CommCall call) const override { return call == CommCall::kCollective ? index_ == 0 : call == CommCall::kReceive; }
  Result<void> prepare(const CollectiveCall& call) override;
  Moved collective(const CollectiveCall& call, Task& task) override;
  Moved send(const void* data, int64_t bytes, int to, Task& task) override;
  Moved receive(void* data, int64_t bytes, int from, Task& task) override;

 private:
  /// The element of a strip of the group's buffer from which a part begins.
  int64_t begin_of(const CollectiveCall& call, int part) const { return part_begin(call.elements / call.strips, size(), part); }
  /// Elements of a part, in one strip.
  int64_t extent_of(const CollectiveCall& call, int part) const { return begin_of(call, part + 1) - begin_of(call, part); }
  RankDevice& device() { return node_.rank(meeting_.ranks[static_cast<size_t>(index_)]); }

  void launch(StreamHandle stream);
  void all_reduce(StreamHandle stream);
  void reduce_scatter(StreamHandle stream);
  void all_gather(StreamHandle stream);
  void broadcast(StreamHandle stream, int root);
  void all_to_all(StreamHandle stream);
  void exchange_rows(StreamHandle stream);
  void spread(const void* from, const std::vector<void*>& to, int64_t bytes, StreamHandle stream);
  const CollectiveCall& call_of(int i) const { return meeting_.members[static_cast<size_t>(i)]->call; }

  Node& node_;
  Meeting& meeting_;
  const int index_;
  const std::vector<Handover*> to_, from_;  ///< by group index, none for this rank
  ThrowingCheck check_;
};

Result<void> OneGpuCommunicator::prepare(const CollectiveCall& call) {
  const bool reduces = call.kind == CollectiveKind::kAllReduce || call.kind == CollectiveKind::kReduceScatter;
  if (reduces && !combinable(call.dtype))
    return Error{ExitCode::kUsage, fmt::format("a collective reduces {}, which the one-gpu transport cannot", name_of(call.dtype)),
                 "reduce in f32, bf16, f16, f64, i32 or i64", ""};
  if (bits_of(call.dtype) < 8)
    return Error{ExitCode::kUsage, fmt::format("a collective moves {}, whose parts may end within a byte", name_of(call.dtype)),
                 "view the buffer as u8", ""};
  if (size() > gpu::Combine::kMost)
    return Error{ExitCode::kUsage, fmt::format("a group of {} ranks on one device; {} is the most", size(), gpu::Combine::kMost),
                 "use fewer ranks", ""};
  if (call.algorithm == Algorithm::kHalvingDoubling && !std::has_single_bit(static_cast<unsigned>(size())))
    return Error{ExitCode::kUsage, fmt::format("halving-doubling in a group of {} ranks, which is no power of two", size()),
                 "set collective_algorithm to ring or auto", ""};
  if (call.kind == CollectiveKind::kAllToAll && call.elements % size() != 0)
    return Error{ExitCode::kUsage, fmt::format("an all_to_all cuts {} elements in {} equal parts", call.elements, size()),
                 "pad the buffer to a multiple of the group's size", ""};
  return {};
}

Moved OneGpuCommunicator::collective(const CollectiveCall& call, Task& task) {
  Meeting::Member& own = *meeting_.members[static_cast<size_t>(index_)];
  const StreamHandle stream = device().stream(task.stream());
  const int64_t sent = call.sent != nullptr
                           ? bytes_to_others(rows_sent(call, size(), task.rank()), index_)
                           : sent_elements(call.kind, call.algorithm, call.elements, size(), index_, call.root, call.per_node) *
                                 bits_of(call.dtype) / 8;
  own.call = call;
  check(node_.api(), node_.api().record_event(own.ready, stream), "cudaEventRecord");
  own.arrived.advance();
  const uint64_t round = own.arrived.value();
  Moved moved;
  moved.sent_bytes = sent;
  if (index_ != 0) {
    task.wait(meeting_.launched, round, {WaitCause::Kind::kTaken, meeting_.ranks[0], 0});
    check(node_.api(), node_.api().wait_event(stream, meeting_.done), "cudaStreamWaitEvent");
    moved.carrier_rank = meeting_.ranks[0];
    moved.carrier_instruction = meeting_.leader_instruction;
    return moved;
  }
  for (int i = 1; i < size(); ++i) {
    Meeting::Member& other = *meeting_.members[static_cast<size_t>(i)];
    task.wait(other.arrived, round, {WaitCause::Kind::kMessage, meeting_.ranks[static_cast<size_t>(i)], 0});
    check(node_.api(), node_.api().wait_event(stream, other.ready), "cudaStreamWaitEvent");
  }
  launch(stream);
  check(node_.api(), node_.api().record_event(meeting_.done, stream), "cudaEventRecord");
  meeting_.leader_instruction = task.instruction();
  meeting_.launched.advance();
  return moved;
}

/// The work of every rank, on the leader's stream.
void OneGpuCommunicator::launch(StreamHandle stream) {
  const CollectiveCall& call = call_of(0);
  if (size() == 1) {
    if (call.source != call.target)
      check(node_.api(), node_.api().copy(call.target, call.source, bytes_of(call.dtype, call.elements), stream),
            "cudaMemcpyAsync");
    return;
  }
  for (int i = 1; i < size(); ++i)
    SHARDLAB_CHECK(call_of(i).kind == call.kind && call_of(i).elements == call.elements && call_of(i).dtype == call.dtype &&
                       call_of(i).strips == call.strips && call_of(i).root == call.root,
                   "ranks {} and {} meet in different collectives", meeting_.ranks[0], meeting_.ranks[static_cast<size_t>(i)]);
  switch (call.kind) {
    case CollectiveKind::kAllReduce: return all_reduce(stream);
    case CollectiveKind::kReduceScatter: return reduce_scatter(stream);
    case CollectiveKind::kAllGather: return all_gather(stream);
    case CollectiveKind::kBroadcast: return broadcast(stream, call.root);
    case CollectiveKind::kAllToAll: return call.sent != nullptr ? exchange_rows(stream) : all_to_all(stream);
  }
}

void OneGpuCommunicator::all_reduce(StreamHandle stream) {
  std::vector<const void*> parts;
  std::vector<void*> outs;
  for (int i = 0; i < size(); ++i) {
    parts.push_back(call_of(i).source);
    outs.push_back(call_of(i).target);
  }
  const CollectiveCall& call = call_of(0);
  node_.kernels().combine({.parts = parts.data(),
                           .count = size(),
                           .outs = outs.data(),
                           .out_count = size(),
                           .n = call.elements,
                           .dtype = call.dtype,
                           .maximum = call.reduce == ReduceOp::kMax},
                          {stream.value, &check_});
}

/// One launch a rank and strip, on its part of every rank's source: a target inside the source is written by the launch
/// that reads it.
void OneGpuCommunicator::reduce_scatter(StreamHandle stream) {
  for (int own = 0; own < size(); ++own) {
    const CollectiveCall& call = call_of(own);
    const int64_t extent = extent_of(call, own);
    for (int64_t strip = 0; strip < call.strips && extent != 0; ++strip) {
      const int64_t begin = strip * (call.elements / call.strips) + begin_of(call, own);
      std::vector<const void*> parts;
      for (int i = 0; i < size(); ++i) parts.push_back(bytes_at(call_of(i).source, bytes_of(call.dtype, begin)));
      void* out = bytes_at(call.target, bytes_of(call.dtype, strip * extent));
      node_.kernels().combine({.parts = parts.data(),
                               .count = size(),
                               .outs = &out,
                               .out_count = 1,
                               .n = extent,
                               .dtype = call.dtype,
                               .maximum = call.reduce == ReduceOp::kMax},
                              {stream.value, &check_});
    }
  }
}

void OneGpuCommunicator::all_gather(StreamHandle stream) {
  for (int from = 0; from < size(); ++from) {
    const CollectiveCall& call = call_of(from);
    const int64_t extent = extent_of(call, from);
    for (int64_t strip = 0; strip < call.strips; ++strip) {
      const int64_t begin = strip * (call.elements / call.strips) + begin_of(call, from);
      std::vector<void*> targets;
      for (int i = 0; i < size(); ++i) targets.push_back(bytes_at(call_of(i).target, bytes_of(call.dtype, begin)));
      spread(bytes_at(call.source, bytes_of(call.dtype, strip * extent)), targets, bytes_of(call.dtype, extent), stream);
    }
  }
}

void OneGpuCommunicator::broadcast(StreamHandle stream, int root) {
  const CollectiveCall& call = call_of(root);
  std::vector<void*> targets;
  for (int i = 0; i < size(); ++i) targets.push_back(call_of(i).target);
  spread(call.source, targets, bytes_of(call.dtype, call.elements), stream);
}

void OneGpuCommunicator::all_to_all(StreamHandle stream) {
  const CollectiveCall& first = call_of(0);
  const int64_t bytes = bytes_of(first.dtype, first.elements / size());
  for (int from = 0; from < size(); ++from)
    for (int to = 0; to < size(); ++to)
      check(node_.api(),
            node_.api().copy(bytes_at(call_of(to).target, bytes * from), bytes_at(call_of(from).source, bytes * to), bytes, stream),
            "cudaMemcpyAsync");
}

/// Packed rows, as many as the ranks have counted: a copy for each pair of ranks with rows.
void OneGpuCommunicator::exchange_rows(StreamHandle stream) {
  std::vector<std::vector<RowRun>> in;
  for (int to = 0; to < size(); ++to) in.push_back(rows_received(call_of(to), size(), meeting_.ranks[static_cast<size_t>(to)]));
  for (int from = 0; from < size(); ++from) {
    const int rank = meeting_.ranks[static_cast<size_t>(from)];
    const std::vector<RowRun> out = rows_sent(call_of(from), size(), rank);
    for (int to = 0; to < size(); ++to) {
      const RowRun &going = out[static_cast<size_t>(to)], &coming = in[static_cast<size_t>(to)][static_cast<size_t>(from)];
      SHARDLAB_CHECK(going.bytes == coming.bytes, "rank {} sends {} bytes of rows to rank {}, which expects {}", rank, going.bytes,
                     meeting_.ranks[static_cast<size_t>(to)], coming.bytes);
      if (going.bytes > 0)
        check(node_.api(),
              node_.api().copy(bytes_at(call_of(to).target, coming.begin), bytes_at(call_of(from).source, going.begin), going.bytes,
                               stream),
              "cudaMemcpyAsync");
    }
  }
}

/// Copies the same bytes to several places; one that already is the source is left out. 32-bit words go in one launch, as integers
/// so that no bit of a NaN is lost.
void OneGpuCommunicator::spread(const void* from, const std::vector<void*>& to, int64_t bytes, StreamHandle stream) {
  std::vector<void*> outs;
  for (void* t : to)
    if (t != from) outs.push_back(t);
  if (outs.empty() || bytes == 0) return;
  const auto whole_words = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 4 == 0; };
  if (bytes % 4 == 0 && whole_words(from) && std::ranges::all_of(outs, whole_words)) {
    node_.kernels().combine({.parts = &from,
                             .count = 1,
                             .outs = outs.data(),
                             .out_count = static_cast<int>(outs.size()),
                             .n = bytes / 4,
                             .dtype = DType::i32},
                            {stream.value, &check_});
    return;
  }
  for (void* t : outs) check(node_.api(), node_.api().copy(t, from, bytes, stream), "cudaMemcpyAsync");
}

Moved OneGpuCommunicator::send(const void* data, int64_t bytes, int to, Task& task) {
  Handover& h = *to_[static_cast<size_t>(to)];
  Api& api = node_.api();
  const StreamHandle stream = device().stream(task.stream());
  h.data = data;
  h.bytes = bytes;
  check(api, api.record_event(h.ready, stream), "cudaEventRecord");
  h.posted.advance();
  const int peer = meeting_.ranks[static_cast<size_t>(to)];
  task.wait(h.taken, h.posted.value(), {WaitCause::Kind::kTaken, peer, 0});
  check(api, api.wait_event(stream, h.done), "cudaStreamWaitEvent");
  Moved moved;
  moved.sent_bytes = bytes;
  moved.carrier_rank = peer;
  moved.carrier_instruction = h.receiver_instruction;
  return moved;
}

Moved OneGpuCommunicator::receive(void* data, int64_t bytes, int from, Task& task) {
  Handover& h = *from_[static_cast<size_t>(from)];
  Api& api = node_.api();
  const StreamHandle stream = device().stream(task.stream());
  const int peer = meeting_.ranks[static_cast<size_t>(from)];
  task.wait(h.posted, h.taken.value() + 1, {WaitCause::Kind::kMessage, peer, 0});
  SHARDLAB_CHECK(h.bytes == bytes, "rank {} expects {} bytes of rank {}, which offers {}", task.rank(), bytes, peer, h.bytes);
  check(api, api.wait_event(stream, h.ready), "cudaStreamWaitEvent");
  if (bytes > 0) check(api, api.copy(data, h.data, bytes, stream), "cudaMemcpyAsync");
  check(api, api.record_event(h.done, stream), "cudaEventRecord");
  h.receiver_instruction = task.instruction();
  h.taken.advance();
  return {};
}

}  // namespace

Meeting& OneGpuTransport::meeting(CommId comm, std::span<const int> members) {
  auto& slot = meetings_[{comm.value, members.front()}];
  if (!slot) {
    slot = std::make_unique<Meeting>();
    slot->ranks.assign(members.begin(), members.end());
    for (const int rank : members) {
      slot->members.push_back(std::make_unique<Meeting::Member>());
      slot->members.back()->ready = node_.rank(rank).create_event();
    }
    slot->done = node_.rank(members.front()).create_event();
  }
  return *slot;
}

Handover& OneGpuTransport::handover(CommId comm, int from, int to) {
  auto& slot = handovers_[{comm.value, from, to}];
  if (!slot) {
    slot = std::make_unique<Handover>();
    slot->ready = node_.rank(from).create_event();
    slot->done = node_.rank(to).create_event();
  }
  return *slot;
}

std::unique_ptr<Communicator> OneGpuTransport::join(int rank, CommId comm, std::span<const int> members) {
  const auto self = std::ranges::find(members, rank);
  SHARDLAB_CHECK(self != members.end(), "rank {} joins a group that it is not in", rank);
  const std::lock_guard lock(mutex_);
  std::vector<Handover*> to(members.size()), from(members.size());
  for (size_t i = 0; i < members.size(); ++i) {
    if (members[i] == rank) continue;
    to[i] = &handover(comm, rank, members[i]);
    from[i] = &handover(comm, members[i], rank);
  }
  return std::make_unique<OneGpuCommunicator>(node_, meeting(comm, members), static_cast<int>(self - members.begin()),
                                              std::move(to), std::move(from));
}

}  // namespace shardlab::runtime::cuda
