#include "runtime/thread_transport.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "plan/base/check.h"
#include "plan/collective_steps.h"
#include "runtime/reduction.h"

namespace shardlab::runtime {

namespace {

using Action = CollectiveStep::Action;
constexpr int kEveryOther = -2;

std::byte* bytes_at(void* base, int64_t offset) { return static_cast<std::byte*>(base) + offset; }
const std::byte* bytes_at(const void* base, int64_t offset) { return static_cast<const std::byte*>(base) + offset; }

/// One side of the channels of one communicator.
class ThreadCommunicator final : public Communicator {
 public:
  ThreadCommunicator(const kernels::Kernels& kernels, std::vector<int> members, int index, std::vector<Channel*> to,
                     std::vector<Channel*> from)
      : kernels_(kernels), members_(std::move(members)), index_(index), to_(std::move(to)), from_(std::move(from)) {}

  int size() const override { return static_cast<int>(members_.size()); }
  int index() const override { return index_; }
  Result<void> prepare(const CollectiveCall& call) override;
  Moved collective(const CollectiveCall& call, Task& task) override;
  Moved send(const void* data, int64_t bytes, int to, Task& task) override;
  Moved receive(void* data, int64_t bytes, int from, Task& task) override;

 private:
  /// The steps of one kind of call, generated once.
  struct Schedule {
    CollectiveKind kind;
    Algorithm algorithm;
    int root;
    std::vector<CollectiveStep> steps;
  };
  /// One call under way.
  struct Run {
    const CollectiveCall& call;
    const void* offered = nullptr;  ///< the buffer whose parts peers read
    void* own = nullptr;            ///< the buffer that receives
    Task& task;
    Moved moved;
  };

  const Schedule& schedule_of(const CollectiveCall& call);
  /// Of the first strip.
  int64_t begin_of(const CollectiveCall& call, int part) const {
    return bytes_of(call.dtype, part_begin(call.elements / call.strips, size(), part));
  }
  int64_t strip_of_part(const CollectiveCall& call, int part) const { return begin_of(call, part + 1) - begin_of(call, part); }
  int64_t bytes_of_part(const CollectiveCall& call, int part) const { return call.strips * strip_of_part(call, part); }
  int64_t bytes_of_strip(const CollectiveCall& call) const { return bytes_of(call.dtype, call.elements / call.strips); }
  int64_t bytes_of_parts(const CollectiveCall& call, const std::vector<int>& parts) const;

  void start(Run& run) const;
  void finish(Run& run) const;
  void step(Run& run, const CollectiveStep& s);
  void staged_step(Run& run, const CollectiveStep& s);
  void read_from(Run& run, const CollectiveStep& s, int from, std::span<const int> parts);
  void reduce_from_all(Run& run, int part);

  void offer(Run& run, int to, int64_t bytes);
  const void* await_offer(Moved& moved, Task& task, int from, int64_t bytes);
  void release(int from);
  void await_taken(Moved& moved, Task& task, int to);

  const kernels::Kernels& kernels_;
  const std::vector<int> members_;
  const int index_;
  const std::vector<Channel*> to_, from_;  ///< by group index, none for this rank
  std::vector<Schedule> schedules_;
  std::vector<std::byte> stage_;  ///< of an all_to_all by halving-doubling
};

int64_t ThreadCommunicator::bytes_of_parts(const CollectiveCall& call, const std::vector<int>& parts) const {
  int64_t bytes = 0;
  for (const int p : parts) bytes += bytes_of_part(call, p);
  return bytes;
}

const ThreadCommunicator::Schedule& ThreadCommunicator::schedule_of(const CollectiveCall& call) {
  for (const Schedule& s : schedules_)
    if (s.kind == call.kind && s.algorithm == call.algorithm && s.root == call.root) return s;
  schedules_.push_back(
      {call.kind, call.algorithm, call.root, collective_steps(call.kind, call.algorithm, size(), index_, call.root)});
  return schedules_.back();
}

Result<void> ThreadCommunicator::prepare(const CollectiveCall& call) {
  const bool reduces = call.kind == CollectiveKind::kAllReduce || call.kind == CollectiveKind::kReduceScatter;
  if (reduces && !reducible(call.dtype))
    return Error{ExitCode::kUsage, fmt::format("a collective reduces {}, which the thread transport cannot", name_of(call.dtype)),
                 "reduce in f32, f64, i32 or i64", ""};
  if (bits_of(call.dtype) < 8)
    return Error{ExitCode::kUsage, fmt::format("a collective moves {}, whose parts may end within a byte", name_of(call.dtype)),
                 "view the buffer as u8", ""};
  if (call.algorithm == Algorithm::kHalvingDoubling && !std::has_single_bit(static_cast<unsigned>(size())))
    return Error{ExitCode::kUsage, fmt::format("halving-doubling in a group of {} ranks, which is no power of two", size()),
                 "set collective_algorithm to ring or auto", ""};
  if (call.kind == CollectiveKind::kAllToAll && call.elements % size() != 0)
    return Error{ExitCode::kUsage, fmt::format("an all_to_all cuts {} elements in {} equal parts", call.elements, size()),
                 "pad the buffer to a multiple of the group's size", ""};
  if (call.kind == CollectiveKind::kReduceScatter && call.algorithm != Algorithm::kDirect && call.source != nullptr && size() > 1 &&
      call.target != bytes_at(call.source, begin_of(call, index_)))
    return Error{
        ExitCode::kUsage,
        "a reduce_scatter by ring or halving-doubling keeps partial sums in its source, so its result must be a view of that",
        "make the destination a sharded view of the source, or use the direct algorithm", ""};
  schedule_of(call);
  return {};
}

Moved ThreadCommunicator::collective(const CollectiveCall& call, Task& task) {
  Run run{call, nullptr, nullptr, task, {}};
  start(run);
  const bool staged = call.kind == CollectiveKind::kAllToAll && call.algorithm == Algorithm::kHalvingDoubling;
  for (const CollectiveStep& s : schedule_of(call).steps) {
    task.pause();
    if (staged)
      staged_step(run, s);
    else
      step(run, s);
  }
  finish(run);
  return run.moved;
}

/// Chooses the buffer that the steps work on, and puts this rank's own contribution where they expect it.
void ThreadCommunicator::start(Run& run) const {
  const CollectiveCall& call = run.call;
  const int64_t own_begin = begin_of(call, index_), own_bytes = bytes_of_part(call, index_);
  run.offered = call.target;
  run.own = call.target;
  switch (call.kind) {
    case CollectiveKind::kReduceScatter:
      run.offered = call.source;
      run.own = const_cast<void*>(call.source);  // the plan lets a reduce_scatter in place overwrite what it reads
      return;
    case CollectiveKind::kAllToAll:
      if (call.algorithm != Algorithm::kHalvingDoubling) run.offered = call.source;
      break;
    default: break;
  }
  if (call.target == nullptr) return;
  if (call.kind == CollectiveKind::kAllGather) {
    std::byte* place = bytes_at(call.target, own_begin);
    const int64_t strip = strip_of_part(call, index_);
    for (int64_t s = 0; s < call.strips && place != call.source; ++s)
      std::memcpy(place + s * bytes_of_strip(call), bytes_at(call.source, s * strip), static_cast<size_t>(strip));
  } else if (call.kind == CollectiveKind::kAllToAll && call.algorithm != Algorithm::kHalvingDoubling) {
    std::memcpy(bytes_at(call.target, own_begin), bytes_at(call.source, own_begin), static_cast<size_t>(own_bytes));
  } else if (call.target != call.source) {
    std::memcpy(call.target, call.source, static_cast<size_t>(bytes_of(call.dtype, call.elements)));
  }
}

/// A reduce_scatter apart from its source, in a group of one, is a copy; in larger groups `direct` has written the target.
void ThreadCommunicator::finish(Run& run) const {
  const CollectiveCall& call = run.call;
  if (call.kind == CollectiveKind::kReduceScatter && size() == 1 && call.target != nullptr && call.target != call.source)
    std::memcpy(call.target, call.source, static_cast<size_t>(bytes_of(call.dtype, call.elements)));
}

/// Offers what is sent, reads what is received, and returns once the peers have read too.
void ThreadCommunicator::step(Run& run, const CollectiveStep& s) {
  if (s.send_to >= 0) offer(run, s.send_to, bytes_of_parts(run.call, s.send_parts));
  if (s.send_to == kEveryOther)
    for (int d = 0; d < size(); ++d)
      if (d != index_) offer(run, d, s.scatter ? bytes_of_part(run.call, d) : bytes_of_parts(run.call, s.send_parts));

  if (s.receive_from >= 0) read_from(run, s, s.receive_from, s.receive_parts);
  if (s.receive_from == kEveryOther) {
    if (s.action == Action::kTreeReduce) {
      reduce_from_all(run, s.receive_parts.front());
    } else {
      for (const int from : s.receive_parts) read_from(run, s, from, std::span(&from, 1));
    }
  }

  if (s.send_to >= 0) await_taken(run.moved, run.task, s.send_to);
  if (s.send_to == kEveryOther)
    for (int d = 0; d < size(); ++d)
      if (d != index_) await_taken(run.moved, run.task, d);
}

/// Reads `parts` of what `from` offers into the same parts of the own buffer. In an all_to_all the sender's part for this rank
/// becomes the sender's part here.
void ThreadCommunicator::read_from(Run& run, const CollectiveStep& s, int from, std::span<const int> parts) {
  const CollectiveCall& call = run.call;
  int64_t bytes = 0;
  for (const int p : parts) bytes += bytes_of_part(call, p);
  const void* theirs = await_offer(run.moved, run.task, from, bytes);
  for (const int p : parts) {
    if (theirs == nullptr) break;
    const int64_t there = begin_of(call, call.kind == CollectiveKind::kAllToAll ? index_ : p);
    std::byte* here = bytes_at(run.own, begin_of(call, p));
    for (int64_t strip = 0; strip < call.strips; ++strip) {
      std::byte* to = here + strip * bytes_of_strip(call);
      const std::byte* source = bytes_at(theirs, there + strip * bytes_of_strip(call));
      if (s.action == Action::kReduce)
        combine(kernels_, call.dtype, call.reduce, to, source, strip_of_part(call, p) * 8 / bits_of(call.dtype));
      else
        std::memcpy(to, source, static_cast<size_t>(strip_of_part(call, p)));
    }
  }
  release(from);
}

/// The canonical tree over all ranks' copies of `part`, read where they lie.
void ThreadCommunicator::reduce_from_all(Run& run, int part) {
  const CollectiveCall& call = run.call;
  const int64_t offset = begin_of(call, part), strip_bytes = strip_of_part(call, part);
  std::vector<const void*> bases(static_cast<size_t>(size())), leaves(bases.size());
  for (int i = 0; i < size(); ++i)
    bases[static_cast<size_t>(i)] = i == index_ ? run.own : await_offer(run.moved, run.task, i, bytes_of_part(call, part));
  for (int64_t strip = 0; strip < call.strips && run.own != nullptr; ++strip) {
    const int64_t there = offset + strip * bytes_of_strip(call);
    std::ranges::transform(bases, leaves.begin(), [&](const void* base) { return bytes_at(base, there); });
    const bool apart = call.kind == CollectiveKind::kReduceScatter;
    void* out = apart ? bytes_at(call.target, strip * strip_bytes) : bytes_at(run.own, there);
    tree_combine(kernels_, call.dtype, call.reduce, leaves, out, strip_bytes * 8 / bits_of(call.dtype));
  }
  for (int i = 0; i < size(); ++i)
    if (i != index_) release(i);
}

/// A step whose sent and received parts are the same places: what arrives is staged until the peer has read too. The part in the
/// peer's place p comes to lie in place p with the bit of the step turned over.
void ThreadCommunicator::staged_step(Run& run, const CollectiveStep& s) {
  const CollectiveCall& call = run.call;
  const int bit = s.send_to ^ index_;
  const int64_t part_bytes = bytes_of_part(call, 0);
  offer(run, s.send_to, bytes_of_parts(call, s.send_parts));
  const void* theirs = await_offer(run.moved, run.task, s.receive_from, bytes_of_parts(call, s.receive_parts));
  stage_.resize(static_cast<size_t>(part_bytes) * s.receive_parts.size());
  std::byte* staged = stage_.data();
  for (const int p : s.receive_parts) {
    if (theirs != nullptr) std::memcpy(staged, bytes_at(theirs, begin_of(call, p ^ bit)), static_cast<size_t>(part_bytes));
    staged += part_bytes;
  }
  release(s.receive_from);
  await_taken(run.moved, run.task, s.send_to);
  staged = stage_.data();
  for (const int p : s.receive_parts) {
    if (theirs != nullptr) std::memcpy(bytes_at(run.own, begin_of(call, p)), staged, static_cast<size_t>(part_bytes));
    staged += part_bytes;
  }
}

void ThreadCommunicator::offer(Run& run, int to, int64_t bytes) {
  Channel& channel = *to_[static_cast<size_t>(to)];
  channel.data = run.offered;
  channel.bytes = bytes;
  ++channel.offered;
  channel.posted.advance();
  run.moved.sent_bytes += bytes;
}

/// The buffer that `from` offers, once it does.
const void* ThreadCommunicator::await_offer(Moved& moved, Task& task, int from, int64_t bytes) {
  Channel& channel = *from_[static_cast<size_t>(from)];
  const int peer = members_[static_cast<size_t>(from)];
  const double begin = task.now();
  double arrived = begin;
  if (channel.posted.value() <= channel.read) {
    task.wait(channel.posted, channel.read + 1, {WaitCause::Kind::kMessage, peer, 0});
    arrived = task.now();
    moved.peer_wait_s += arrived - begin;
  }
  SHARDLAB_CHECK(channel.bytes == bytes, "rank {} expects {} bytes of rank {}, which offers {}", task.rank(), bytes, peer,
                 channel.bytes);
  channel.read_begin = arrived;
  return channel.data;
}

void ThreadCommunicator::release(int from) {
  Channel& channel = *from_[static_cast<size_t>(from)];
  ++channel.read;
  channel.taken.advance();
}

/// Of the time until `to` has read, what went by before it began is waiting for a peer; the rest is the moving itself.
void ThreadCommunicator::await_taken(Moved& moved, Task& task, int to) {
  Channel& channel = *to_[static_cast<size_t>(to)];
  if (channel.taken.value() >= channel.offered) return;
  const double begin = task.now();
  task.wait(channel.taken, channel.offered, {WaitCause::Kind::kTaken, members_[static_cast<size_t>(to)], 0});
  const double end = task.now();
  moved.peer_wait_s += std::clamp(channel.read_begin - begin, 0.0, end - begin);
}

Moved ThreadCommunicator::send(const void* data, int64_t bytes, int to, Task& task) {
  const CollectiveCall call;
  Run run{call, data, nullptr, task, {}};
  offer(run, to, bytes);
  await_taken(run.moved, task, to);
  return run.moved;
}

Moved ThreadCommunicator::receive(void* data, int64_t bytes, int from, Task& task) {
  Moved moved;
  const void* theirs = await_offer(moved, task, from, bytes);
  if (theirs != nullptr && bytes > 0) std::memcpy(data, theirs, static_cast<size_t>(bytes));
  release(from);
  return moved;
}

}  // namespace

Channel& ThreadTransport::channel(CommId comm, int from, int to) {
  auto& slot = channels_[{comm.value, from, to}];
  if (!slot) slot = std::make_unique<Channel>();
  return *slot;
}

std::unique_ptr<Communicator> ThreadTransport::join(int rank, CommId comm, std::span<const int> members) {
  const auto self = std::ranges::find(members, rank);
  SHARDLAB_CHECK(self != members.end(), "rank {} joins a group that it is not in", rank);
  const std::lock_guard lock(mutex_);
  std::vector<Channel*> to(members.size()), from(members.size());
  for (size_t i = 0; i < members.size(); ++i) {
    if (members[i] == rank) continue;
    to[i] = &channel(comm, rank, members[i]);
    from[i] = &channel(comm, members[i], rank);
  }
  return std::make_unique<ThreadCommunicator>(kernels_, std::vector<int>(members.begin(), members.end()),
                                              static_cast<int>(self - members.begin()), std::move(to), std::move(from));
}

}  // namespace shardlab::runtime
