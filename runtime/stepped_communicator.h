// The collectives of the CPU: plan/collective_steps.h, executed step by step over any wire.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "kernels/kernels.h"
#include "plan/collective_steps.h"
#include "runtime/wire.h"

namespace shardlab::runtime {

/// One rank's handle on one communicator, whatever its wires are. Needs no scratch, but for an all_to_all that is
/// staged; packed rows that go by node are staged in the call's `stage`.
///
/// Sums: `direct` takes the canonical tree in group order, the other algorithms add what arrives to the own part. fp32,
/// fp64, i32 and i64 are reduced; every whole-byte type is moved.
class SteppedCommunicator final : public Communicator {
 public:
  /// `wires` by group index; none at this rank's own.
  SteppedCommunicator(const kernels::Kernels& kernels, int index, std::vector<std::unique_ptr<Wire>> wires)
      : kernels_(kernels), index_(index), wires_(std::move(wires)) {}

  int size() const override { return static_cast<int>(wires_.size()); }
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
    int root, per_node;
    std::vector<CollectiveStep> steps;
  };
  /// One call under way.
  struct Run {
    const CollectiveCall& call;
    const void* offered = nullptr;  ///< the buffer whose parts peers read
    void* own = nullptr;            ///< the buffer that receives
    Task& task;
    Moved moved;
    bool own_is_apart = false;  ///< this rank's part of an all_gather lies in the call's source alone
  };

  const Schedule& schedule_of(const CollectiveCall& call);
  /// Of the first strip.
  int64_t begin_of(const CollectiveCall& call, int part) const {
    return bytes_of(call.dtype, part_begin(call.elements / call.strips, size(), part));
  }
  int64_t strip_of_part(const CollectiveCall& call, int part) const { return begin_of(call, part + 1) - begin_of(call, part); }
  int64_t bytes_of_part(const CollectiveCall& call, int part) const { return call.strips * strip_of_part(call, part); }
  int64_t bytes_of_strip(const CollectiveCall& call) const { return bytes_of(call.dtype, call.elements / call.strips); }
  int64_t bytes_of_parts(const CollectiveCall& call, std::span<const int> parts) const;

  /// Bytes that lie together in one message: where they lie in its sender's buffer if it does not travel, and where they come to lie.
  struct Piece {
    int64_t there = 0, bytes = 0;
    std::byte* to = nullptr;
  };
  Moved exchange_rows(const CollectiveCall& call, Task& task);
  Moved send_rows_by_node(const CollectiveCall& call, Task& task);
  Moved return_rows_by_node(const CollectiveCall& call, Task& task);
  Moved rehearse_rows_by_node(const CollectiveCall& call, Task& task);
  void swap(int to, const void* buffer, std::span<const Slice> slices, int from, std::span<const Piece> pieces, Moved& moved,
            Task& task);
  void start(Run& run) const;
  void finish(Run& run) const;
  void place_own(Run& run) const;
  void step(Run& run, const CollectiveStep& s);
  void staged_step(Run& run, const CollectiveStep& s);
  void read_from(Run& run, const CollectiveStep& s, int from, std::span<const int> parts, std::span<const int> theirs);
  void reduce_from_all(Run& run, int part);
  void offer(Run& run, int to, std::span<const int> parts);

  const kernels::Kernels& kernels_;
  const int index_;
  const std::vector<std::unique_ptr<Wire>> wires_;
  std::vector<Schedule> schedules_;
  std::vector<Slice> slices_;     ///< of the message on offer
  std::vector<std::byte> stage_;  ///< of an all_to_all that is staged
};

/// `rank`'s handle on a communicator with `members` (ranks in group order, itself included), a wire to each other of them.
std::unique_ptr<Communicator> join_by(const kernels::Kernels& kernels, int rank, std::span<const int> members,
                                      const std::function<std::unique_ptr<Wire>(int peer)>& wire_to);

}  // namespace shardlab::runtime
