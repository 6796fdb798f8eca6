#include "runtime/stepped_communicator.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "plan/base/check.h"
#include "plan/collective_steps.h"
#include "runtime/packed_rows.h"
#include "runtime/reduction.h"

namespace shardlab::runtime {

namespace {

using Action = CollectiveStep::Action;
constexpr int kEveryOther = -2;

std::byte* bytes_at(void* base, int64_t offset) { return static_cast<std::byte*>(base) + offset; }
const std::byte* bytes_at(const void* base, int64_t offset) { return static_cast<const std::byte*>(base) + offset; }

/// Calls use(at, n) for the n bytes from `at` on of the `bytes` bytes that begin at `from` of a message: as pieces while it comes, and at once where
/// it does not travel. So the sum of a piece is made while the next ones are under way.
template <typename Use>
void use_as_it_comes(Wire& wire, const Arrived& message, int64_t from, int64_t bytes, Task& task, const Use& use) {
  const int64_t most = message.packed ? kPieceBytes : bytes;
  for (int64_t at = 0; at < bytes; at += most) {
    const int64_t n = std::min(most, bytes - at);
    wire.await_bytes(from + at + n, task);
    use(at, n);
  }
}

/// Copies the `bytes` bytes that begin at `from` of a message to `to`.
void copy_as_it_comes(Wire& wire, const Arrived& message, int64_t from, int64_t bytes, Task& task, std::byte* to) {
  use_as_it_comes(wire, message, from, bytes, task,
                  [&](int64_t at, int64_t n) { std::memcpy(to + at, message.at + from + at, static_cast<size_t>(n)); });
}

}  // namespace

int64_t SteppedCommunicator::bytes_of_parts(const CollectiveCall& call, std::span<const int> parts) const {
  int64_t bytes = 0;
  for (const int p : parts) bytes += bytes_of_part(call, p);
  return bytes;
}

const SteppedCommunicator::Schedule& SteppedCommunicator::schedule_of(const CollectiveCall& call) {
  for (const Schedule& s : schedules_)
    if (s.kind == call.kind && s.algorithm == call.algorithm && s.root == call.root && s.per_node == call.per_node) return s;
  schedules_.push_back({call.kind, call.algorithm, call.root, call.per_node,
                        collective_steps(call.kind, call.algorithm, size(), index_, call.root, call.per_node)});
  return schedules_.back();
}

Result<void> SteppedCommunicator::prepare(const CollectiveCall& call) {
  const bool reduces = call.kind == CollectiveKind::kAllReduce || call.kind == CollectiveKind::kReduceScatter;
  if (reduces && !reducible(call.dtype))
    return Error{ExitCode::kUsage,
                 fmt::format("a collective reduces {}, which the transports of the CPU cannot", name_of(call.dtype)),
                 "reduce in f32, f64, i32 or i64", ""};
  if (bits_of(call.dtype) < 8)
    return Error{ExitCode::kUsage, fmt::format("a collective moves {}, whose parts may end within a byte", name_of(call.dtype)),
                 "view the buffer as u8", ""};
  if (call.algorithm == Algorithm::kHalvingDoubling && !std::has_single_bit(static_cast<unsigned>(size())))
    return Error{ExitCode::kUsage, fmt::format("halving-doubling in a group of {} ranks, which is no power of two", size()),
                 "set collective_algorithm to ring or auto", ""};
  if (call.algorithm == Algorithm::kHierarchical && size() > 1 && size() % call.per_node != 0)
    return Error{ExitCode::kUsage, fmt::format("hierarchical in a group of {} ranks, {} on a node", size(), call.per_node),
                 "set collective_algorithm to ring or auto", ""};
  if (call.kind == CollectiveKind::kAllToAll && call.elements % size() != 0)
    return Error{ExitCode::kUsage, fmt::format("an all_to_all cuts {} elements in {} equal parts", call.elements, size()),
                 "pad the buffer to a multiple of the group's size", ""};
  if (call.kind == CollectiveKind::kReduceScatter && call.algorithm != Algorithm::kDirect && call.source != nullptr && size() > 1 &&
      call.target != bytes_at(call.source, begin_of(call, index_)))
    return Error{ExitCode::kUsage,
                 "a reduce_scatter that is not direct keeps partial sums in its source, so its result must be a view of that",
                 "make the destination a sharded view of the source, or use the direct algorithm", ""};
  if (call.levels) {
    const int64_t needed = call.levels->stage_bytes(), rows = std::max(call.source_room, call.room);
    if (std::ssize(call.stage) < needed)
      return Error{
          ExitCode::kUsage,
          fmt::format("rows that go by node are staged in {} bytes, and the stream's workspace has {}", needed, call.stage.size()),
          "give the stream a workspace (`scratch_bytes` in plan/work.h), or set collective_algorithm to direct", ""};
    if (rows > std::numeric_limits<int32_t>::max())
      return Error{ExitCode::kUsage, fmt::format("room for {} rows that go by node, whose places are told in 31 bits", rows),
                   "set collective_algorithm to direct", ""};
  }
  schedule_of(call);
  return {};
}

/// Offers `slices` of `buffer` to `to`, reads the message of `from` in pieces, and returns once `to` has read.
void SteppedCommunicator::swap(int to, const void* buffer, std::span<const Slice> slices, int from, std::span<const Piece> pieces,
                               Moved& moved, Task& task) {
  task.pause();
  int64_t going = 0, coming = 0, packed = 0;
  for (const Slice& slice : slices) going += slice.bytes;
  for (const Piece& piece : pieces) coming += piece.bytes;
  wires_[static_cast<size_t>(to)]->offer({buffer, going, buffer != nullptr && going > 0 ? slices : std::span<const Slice>()});
  moved.sent_bytes += going;
  Wire& wire = *wires_[static_cast<size_t>(from)];
  const Arrived theirs = wire.await_offer(coming, moved, task);
  for (const Piece& piece : pieces) {
    if (theirs.at == nullptr) break;
    copy_as_it_comes(wire, theirs, theirs.packed ? packed : piece.there, piece.bytes, task, piece.to);
    packed += piece.bytes;
  }
  wire.release();
  wires_[static_cast<size_t>(to)]->await_taken(moved, task);
}

/// Packed rows, to each peer as many as are counted: in turn to the ranks behind, from those before. Counts of both sides are there
/// before any row moves, so that every message is of the bytes that its reader expects.
Moved SteppedCommunicator::exchange_rows(const CollectiveCall& call, Task& task) {
  if (call.levels) return call.levels->goes ? send_rows_by_node(call, task) : return_rows_by_node(call, task);
  Moved moved;
  const std::vector<RowRun> out = rows_sent(call, size(), task.rank()), in = rows_received(call, size(), task.rank());
  const RowRun &mine_out = out[static_cast<size_t>(index_)], &mine_in = in[static_cast<size_t>(index_)];
  SHARDLAB_CHECK(mine_out.bytes == mine_in.bytes, "rank {} sends itself {} bytes of rows and expects {}", task.rank(),
                 mine_out.bytes, mine_in.bytes);
  std::memcpy(bytes_at(call.target, mine_in.begin), bytes_at(call.source, mine_out.begin), static_cast<size_t>(mine_in.bytes));
  for (int k = 1; k < size(); ++k) {
    const int to = (index_ + k) % size(), from = (index_ - k + size()) % size();
    const RowRun &going = out[static_cast<size_t>(to)], &coming = in[static_cast<size_t>(from)];
    const Slice slice{bytes_at(call.source, going.begin), going.bytes};
    const Piece piece{0, coming.bytes, bytes_at(call.target, coming.begin)};
    swap(to, slice.at, std::span(&slice, 1), from, std::span(&piece, 1), moved, task);
  }
  return moved;
}

Moved SteppedCommunicator::collective(const CollectiveCall& call, Task& task) {
  if (call.sent != nullptr) return exchange_rows(call, task);
  if (call.levels) return rehearse_rows_by_node(call, task);
  Run run{call, nullptr, nullptr, task, {}};
  start(run);
  const bool staged = is_staged(call.kind, call.algorithm);
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
void SteppedCommunicator::start(Run& run) const {
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
      if (!is_staged(call.kind, call.algorithm)) run.offered = call.source;
      break;
    default: break;
  }
  if (call.target == nullptr) return;
  if (call.kind == CollectiveKind::kAllGather) {
    run.own_is_apart = bytes_at(call.target, own_begin) != call.source;
    // A wire that packs sends it from where it lies, and it is put in its place while that is under way.
    if (!std::ranges::all_of(wires_, [](const auto& wire) { return wire == nullptr || wire->packs(); })) place_own(run);
  } else if (call.kind == CollectiveKind::kAllToAll && !is_staged(call.kind, call.algorithm)) {
    std::memcpy(bytes_at(call.target, own_begin), bytes_at(call.source, own_begin), static_cast<size_t>(own_bytes));
  } else if (call.target != call.source) {
    std::memcpy(call.target, call.source, static_cast<size_t>(bytes_of(call.dtype, call.elements)));
  }
}

/// Puts this rank's own part of an all_gather where its peers' parts come.
void SteppedCommunicator::place_own(Run& run) const {
  if (!std::exchange(run.own_is_apart, false)) return;
  const CollectiveCall& call = run.call;
  const int64_t strip = strip_of_part(call, index_);
  for (int64_t s = 0; s < call.strips; ++s)
    std::memcpy(bytes_at(call.target, begin_of(call, index_) + s * bytes_of_strip(call)), bytes_at(call.source, s * strip),
                static_cast<size_t>(strip));
}

/// A reduce_scatter apart from its source, in a group of one, is a copy; in larger groups `direct` has written the target.
void SteppedCommunicator::finish(Run& run) const {
  const CollectiveCall& call = run.call;
  place_own(run);
  if (call.kind == CollectiveKind::kReduceScatter && size() == 1 && call.target != nullptr && call.target != call.source)
    std::memcpy(call.target, call.source, static_cast<size_t>(bytes_of(call.dtype, call.elements)));
}

/// Offers what is sent, reads what is received, and returns once the peers have read too.
void SteppedCommunicator::step(Run& run, const CollectiveStep& s) {
  if (s.send_to >= 0) offer(run, s.send_to, s.send_parts);
  if (s.send_to == kEveryOther)
    for (int d = 0; d < size(); ++d)
      if (d != index_) offer(run, d, s.scatter ? std::span<const int>(&d, 1) : s.send_parts);
  place_own(run);

  if (s.receive_from >= 0) read_from(run, s, s.receive_from, s.receive_parts, s.their_parts);
  if (s.receive_from == kEveryOther) {
    if (s.action == Action::kTreeReduce) {
      reduce_from_all(run, s.receive_parts.front());
    } else {
      for (size_t i = 0; i < s.receive_parts.size(); ++i) {
        const int from = s.receive_parts[i];
        read_from(run, s, from, std::span(&from, 1),
                  s.their_parts.empty() ? std::span<const int>() : std::span(&s.their_parts[i], 1));
      }
    }
  }

  if (s.send_to >= 0) wires_[static_cast<size_t>(s.send_to)]->await_taken(run.moved, run.task);
  if (s.send_to == kEveryOther)
    for (int d = 0; d < size(); ++d)
      if (d != index_) wires_[static_cast<size_t>(d)]->await_taken(run.moved, run.task);
}

/// Reads what `from` offers, its parts `theirs` (none: the same), into `parts` of the own buffer.
void SteppedCommunicator::read_from(Run& run, const CollectiveStep& s, int from, std::span<const int> parts,
                                    std::span<const int> theirs_of) {
  const CollectiveCall& call = run.call;
  Wire& wire = *wires_[static_cast<size_t>(from)];
  const Arrived theirs = wire.await_offer(bytes_of_parts(call, parts), run.moved, run.task);
  int64_t packed = 0;  // bytes of the message before the strip
  for (size_t i = 0; i < parts.size(); ++i) {
    if (theirs.at == nullptr) break;
    const int p = parts[i];
    const int64_t there = begin_of(call, theirs_of.empty() ? p : theirs_of[i]);
    std::byte* here = bytes_at(run.own, begin_of(call, p));
    for (int64_t strip = 0; strip < call.strips; ++strip) {
      std::byte* to = here + strip * bytes_of_strip(call);
      const int64_t from_byte = theirs.packed ? packed : there + strip * bytes_of_strip(call), bytes = strip_of_part(call, p);
      packed += bytes;
      if (s.action == Action::kReduce)
        use_as_it_comes(wire, theirs, from_byte, bytes, run.task, [&](int64_t at, int64_t n) {
          combine(kernels_, call.dtype, call.reduce, to + at, theirs.at + from_byte + at, n * 8 / bits_of(call.dtype));
        });
      else
        copy_as_it_comes(wire, theirs, from_byte, bytes, run.task, to);
    }
  }
  wire.release();
}

/// The canonical tree over all ranks' copies of `part`, read where they lie.
void SteppedCommunicator::reduce_from_all(Run& run, int part) {
  const CollectiveCall& call = run.call;
  const int64_t offset = begin_of(call, part), strip_bytes = strip_of_part(call, part);
  std::vector<Arrived> copies(static_cast<size_t>(size()), {static_cast<const std::byte*>(run.own), false});
  std::vector<const void*> leaves(copies.size());
  for (int i = 0; i < size(); ++i)
    if (i != index_)
      copies[static_cast<size_t>(i)] = wires_[static_cast<size_t>(i)]->await_offer(bytes_of_part(call, part), run.moved, run.task);
  for (int64_t strip = 0; strip < call.strips && run.own != nullptr; ++strip) {
    const int64_t there = offset + strip * bytes_of_strip(call);
    const bool apart = call.kind == CollectiveKind::kReduceScatter;
    std::byte* out = apart ? bytes_at(call.target, strip * strip_bytes) : bytes_at(run.own, there);
    const bool travels = std::ranges::any_of(copies, &Arrived::packed);
    const int64_t most = travels ? kPieceBytes : strip_bytes;
    for (int64_t at = 0; at < strip_bytes; at += most) {
      const int64_t n = std::min(most, strip_bytes - at);
      for (int i = 0; i < size(); ++i)
        if (i != index_) wires_[static_cast<size_t>(i)]->await_bytes(strip * strip_bytes + at + n, run.task);
      std::ranges::transform(copies, leaves.begin(),
                             [&](const Arrived& copy) { return copy.at + at + (copy.packed ? strip * strip_bytes : there); });
      tree_combine(kernels_, call.dtype, call.reduce, leaves, out + at, n * 8 / bits_of(call.dtype));
    }
  }
  for (int i = 0; i < size(); ++i)
    if (i != index_) wires_[static_cast<size_t>(i)]->release();
}

/// A step whose sent and received parts are the same places: what arrives is staged until the peer has read too.
void SteppedCommunicator::staged_step(Run& run, const CollectiveStep& s) {
  const CollectiveCall& call = run.call;
  if (s.send_to < 0) return;  // meets nobody
  const int64_t part_bytes = bytes_of_part(call, 0);
  offer(run, s.send_to, s.send_parts);
  Wire& wire = *wires_[static_cast<size_t>(s.receive_from)];
  const Arrived theirs = wire.await_offer(bytes_of_parts(call, s.receive_parts), run.moved, run.task);
  stage_.resize(static_cast<size_t>(part_bytes) * s.receive_parts.size());
  std::byte* staged = stage_.data();
  for (const int p : s.their_parts) {
    if (theirs.at != nullptr)
      copy_as_it_comes(wire, theirs, theirs.packed ? staged - stage_.data() : begin_of(call, p), part_bytes, run.task, staged);
    staged += part_bytes;
  }
  wire.release();
  wires_[static_cast<size_t>(s.send_to)]->await_taken(run.moved, run.task);
  staged = stage_.data();
  for (const int p : s.receive_parts) {
    if (theirs.at != nullptr) std::memcpy(bytes_at(run.own, begin_of(call, p)), staged, static_cast<size_t>(part_bytes));
    staged += part_bytes;
  }
}

/// Offers the slices that a step sends to `to`: `parts` of every strip, in the order in which the peer receives them.
void SteppedCommunicator::offer(Run& run, int to, std::span<const int> parts) {
  const CollectiveCall& call = run.call;
  Wire& wire = *wires_[static_cast<size_t>(to)];
  Message message{run.offered, bytes_of_parts(call, parts), {}};
  slices_.clear();
  if (wire.packs() && run.offered != nullptr) {
    for (const int p : parts)
      for (int64_t strip = 0; strip < call.strips; ++strip) {
        const int64_t bytes = strip_of_part(call, p);
        const Slice slice{run.own_is_apart && p == index_ ? bytes_at(call.source, strip * bytes)
                                                          : bytes_at(run.offered, begin_of(call, p) + strip * bytes_of_strip(call)),
                          bytes};
        if (!slices_.empty() && slices_.back().at + slices_.back().bytes == slice.at)
          slices_.back().bytes += slice.bytes;
        else if (slice.bytes > 0)
          slices_.push_back(slice);
      }
    message.slices = slices_;
  }
  wire.offer(message);
  run.moved.sent_bytes += message.bytes;
}

Moved SteppedCommunicator::send(const void* data, int64_t bytes, int to, Task& task) {
  Moved moved;
  Wire& wire = *wires_[static_cast<size_t>(to)];
  const Slice all{static_cast<const std::byte*>(data), bytes};
  wire.offer({data, bytes, std::span(&all, data != nullptr && bytes > 0 ? 1 : 0)});
  moved.sent_bytes = bytes;
  wire.await_taken(moved, task);
  return moved;
}

Moved SteppedCommunicator::receive(void* data, int64_t bytes, int from, Task& task) {
  Moved moved;
  Wire& wire = *wires_[static_cast<size_t>(from)];
  const Arrived theirs = wire.await_offer(bytes, moved, task);
  if (theirs.at != nullptr) copy_as_it_comes(wire, theirs, 0, bytes, task, static_cast<std::byte*>(data));
  wire.release();
  return moved;
}

std::unique_ptr<Communicator> join_by(const kernels::Kernels& kernels, int rank, std::span<const int> members,
                                      const std::function<std::unique_ptr<Wire>(int peer)>& wire_to) {
  const auto self = std::ranges::find(members, rank);
  SHARDLAB_CHECK(self != members.end(), "rank {} joins a group that it is not in", rank);
  std::vector<std::unique_ptr<Wire>> wires;
  for (const int peer : members) wires.push_back(peer == rank ? nullptr : wire_to(peer));
  return std::make_unique<SteppedCommunicator>(kernels, static_cast<int>(self - members.begin()), std::move(wires));
}

}  // namespace shardlab::runtime
