// The interface by which a back end of a device tells a tracer which op the work it hands over belongs to. The runtime calls it,
// the profiler implements it, `cli` brings them together.
#pragma once

#include <compare>
#include <cstdint>

#include "plan/base/check.h"

namespace shardlab {

/// One op as it ran: with the trace's rank and instruction, the number of the step as `TraceEvent::step` has it.
struct OpKey {
  int32_t step = 0;
  int32_t rank = 0;
  int32_t instruction = -1;

  friend auto operator<=>(const OpKey&, const OpKey&) = default;
};

inline constexpr int kOpIdRankBits = 18, kOpIdInstructionBits = 24, kOpIdStepBits = 64 - kOpIdRankBits - kOpIdInstructionBits;

/// The key as one number, never 0: the external correlation id of the device's records. Holds 4 M steps, 262 144 ranks (a rank's
/// field keeps rank + 1) and 16 M instructions.
constexpr uint64_t op_id(const OpKey& key) {
  SHARDLAB_CHECK(key.step >= 0 && key.step < (1 << kOpIdStepBits) && key.rank >= 0 && key.rank < (1 << kOpIdRankBits) - 1 &&
                     key.instruction >= 0 && key.instruction < (1 << kOpIdInstructionBits),
                 "step {}, rank {}, instruction {} do not fit an op id", key.step, key.rank, key.instruction);
  return static_cast<uint64_t>(key.step) << (kOpIdRankBits + kOpIdInstructionBits) |
         static_cast<uint64_t>(key.rank + 1) << kOpIdInstructionBits | static_cast<uint64_t>(key.instruction);
}

/// The key of an id that `op_id` made.
constexpr OpKey op_key(uint64_t id) {
  constexpr uint64_t kRank = (uint64_t{1} << kOpIdRankBits) - 1, kInstruction = (uint64_t{1} << kOpIdInstructionBits) - 1;
  return {static_cast<int32_t>(id >> (kOpIdRankBits + kOpIdInstructionBits)),
          static_cast<int32_t>(id >> kOpIdInstructionBits & kRank) - 1, static_cast<int32_t>(id & kInstruction)};
}

/// Follows the device work of ops. A back end calls, in every step,
///
///   tracer.begin_step(step, clock.now(), error);        // one thread, once the device is idle, before any op of the step
///   tracer.begin_op(key); launch...; tracer.end_op(key);  // the thread that launches, around everything it gives to the device
///
/// and, where `wants_events()`, records a pair of device events around each op on the op's stream and reports them after the step
/// has ended with `op_timed`. Only ops that hand work to the device are named: allocations and frees are not.
class DeviceTracer {
 public:
  virtual ~DeviceTracer() = default;

  /// Must the back end time the ops itself? False where the device's own records tell.
  virtual bool wants_events() const = 0;

  /// `now`: the step's common start on the session's clock, the 0 of the times in its trace events. Where `wants_events()`, a
  /// reference event was recorded on the device at `now`, give or take `error_s`.
  virtual void begin_step(int32_t step, double now, double error_s) = 0;

  /// Everything that this thread hands to the device from here to `end_op` belongs to the op. Not nested. `now`: session's clock.
  virtual void begin_op(const OpKey& op, double now) = 0;
  virtual void end_op(const OpKey& op) = 0;
  /// Everything that this thread hands to the device from here to `end_op` goes with the op and was not launched by it: copies of counts to the
  /// host, which a rank makes of its own where another carries the op.
  virtual void begin_aside(const OpKey& op) = 0;

  /// Some rank hands over the device work of `by` for several ranks: one kernel for all ranks of a collective, one copy for a send
  /// and its receive. That work counts as the work of `op` too; `op` itself is not begun. `now`: when the rank of `op` had arrived.
  /// Any thread may call this, any time before the recorder's `take`.
  virtual void op_carried(const OpKey& op, const OpKey& by, double now) = 0;

  /// The op's pair of device events, in milliseconds after the step's reference event, as cudaEventElapsedTime gives them: where
  /// `wants_events()`, and, by the host's clock after the step's begin, of ops that the host does itself.
  virtual void op_timed(const OpKey& op, double begin_ms, double end_ms) = 0;
};

}  // namespace shardlab
