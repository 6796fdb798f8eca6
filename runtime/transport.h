// The interface that moves bytes between ranks.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "plan/base/dtype.h"
#include "plan/base/result.h"
#include "plan/op.h"
#include "plan/row_levels.h"
#include "runtime/crew.h"

namespace shardlab::runtime {

/// One collective as a rank calls it. `elements` is the full, gathered extent: of the source of a reduce_scatter, of the
/// target of an all_gather. Null pointers make a rehearsal: every message is met and counted, none is moved.
///
/// all_reduce and broadcast: source == target, or source is copied to target first. reduce_scatter: target is this rank's part,
/// inside source or apart from it; where it lies inside, the rest of source is left undefined. all_gather: source is this rank's
/// part, inside target or apart. all_to_all: both whole and apart, part j of source goes to group index j.
struct CollectiveCall {
  CollectiveKind kind = CollectiveKind::kAllReduce;
  ReduceOp reduce = ReduceOp::kSum;
  Algorithm algorithm = Algorithm::kRing;
  DType dtype = DType::f32;
  int64_t elements = 0;  ///< of the whole
  int root = 0;
  const void* source = nullptr;
  void* target = nullptr;
  /// The whole is so many buffers one after the other, each cut for the ranks (`strips_of`); a part lies apart from it then.
  int64_t strips = 1;
  int per_node = 1;  ///< of kHierarchical: ranks of the group on one node, one after the other
  /// all_to_all of packed rows: sent[i * counts + ..] add up to the rows that go to group index i, received[j * counts + ..] to those that
  /// come from j; rows lie one rank's behind another's. `elements` is what a rehearsal moves. Without
  /// `levels` every algorithm goes from rank to rank, as the ring does. Null: equal parts.
  const int32_t* sent = nullptr;
  const int32_t* received = nullptr;
  int64_t counts = 0;
  int64_t row_bytes = 0;
  /// Rows that `source` and `target` hold: at least those of each message. A message that would reach beyond the end lies at the end, on top
  /// of others, and goes out from there again: every message has its true size, and what lies twice in one place is of no use to anybody.
  int64_t source_room = 0;
  int64_t room = 0;
  /// Packed rows go by node, through `stage` in the rank's arena, of RowLevels::stage_bytes; without levels from rank to rank.
  std::optional<RowLevels> levels = std::nullopt;
  std::span<std::byte> stage = {};
  /// Of levels in which a token crosses once: choice[t * top_k + ..] are the places of token t's experts, below 0 where its row is dropped. A
  /// rank has `experts` places. Rows of `source` are by place, and then by token: copies of their tokens, or each row of `tokens` times the
  /// weight of the choice.
  std::span<const int32_t> choice = {};
  int64_t top_k = 1;
  int64_t experts = 1;
  const float* weights = nullptr;
  const void* tokens = nullptr;
};

/// The figures of a call, measured where it was done.
struct Moved {
  int64_t sent_bytes = 0;  ///< payload this rank sent
  double peer_wait_s = 0;  ///< of the call's time, spent until peers had arrived
  /// Where a peer gave a device the work of this call with its own: that rank, and the instruction it was at.
  int32_t carrier_rank = -1;
  int32_t carrier_instruction = -1;
};

/// The kinds of call on a communicator.
enum class CommCall : uint8_t { kCollective, kSend, kReceive };

/// One rank's handle on one communicator of the plan. Calls on it run in issue order, from one thread at a time. Every call
/// returns when the rank's buffers may be used again, and throws Released when the session fails meanwhile.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int size() const = 0;
  virtual int index() const = 0;
  /// Whether this rank itself gives a device the work of its calls; otherwise a peer does it along with its own.
  virtual bool issues(CommCall) const { return true; }

  /// Checks once, before the first step, that `call` can be carried out; the pointers may be null.
  virtual Result<void> prepare(const CollectiveCall& call) = 0;
  virtual Moved collective(const CollectiveCall& call, Task& task) = 0;
  /// To and from the group index given. `data` null: a rehearsal.
  virtual Moved send(const void* data, int64_t bytes, int to, Task& task) = 0;
  virtual Moved receive(void* data, int64_t bytes, int from, Task& task) = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;
  /// Rank `rank` joins communicator `comm` with `members` (ranks in group order, itself included). Safe from several threads.
  /// A rank may join the same communicator several times: the handles share one order of messages per pair.
  virtual std::unique_ptr<Communicator> join(int rank, CommId comm, std::span<const int> members) = 0;
  /// Memory for one of this process's ranks, of the bytes that its arena has in `space`, where peers must see it; null: any will do.
  virtual std::byte* storage(int /*rank*/, Space) { return nullptr; }
  /// Does `Moved::sent_bytes` count what was sent? False where another library or one kernel moves it: then it is the payload that
  /// the plan's algorithm would send, and no measurement.
  virtual bool counts_wire() const { return true; }
  /// Ends what a device still does for a session that has failed, so that it can be torn down. Safe from any thread.
  virtual void abort() {}
};

}  // namespace shardlab::runtime
