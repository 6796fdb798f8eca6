// The interfaces by which folders that must not know each other meet. `cli` injects the implementations.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "plan/base/check.h"
#include "plan/case.h"
#include "plan/plan.h"
#include "plan/program.h"
#include "plan/trace.h"

namespace shardlab {

/// How long one instruction takes on its own, given how many ranks of the machine are busy. Implemented by the simulator.
class CostModel {
 public:
  virtual ~CostModel() = default;
  /// Seconds of compute and memory work of a kRun instruction that is no collective or p2p op; `busy_cores` share the machine.
  virtual Seconds compute(const Plan& plan, const Instruction& instruction, int busy_cores) const = 0;
  /// Seconds a collective or p2p op takes once every peer has arrived.
  virtual Seconds communicate(const Plan& plan, const Instruction& instruction, int busy_cores) const = 0;
  /// Host cost of launching one instruction, and of one stream waking another.
  virtual Seconds dispatch() const = 0;
  virtual Seconds wake() const = 0;
  /// Whether the instruction lies outside what the model's source covers.
  virtual bool extrapolates(const Plan&, const Instruction&) const { return false; }
};

/// Receives what happened, from the executor's threads. One call per event; must be cheap and safe from each rank's streams.
class Recorder {
 public:
  virtual ~Recorder() = default;
  virtual void record(const TraceEvent& event) = 0;
  /// The interval of one step on one rank, in seconds from the step's common start. Called after the step, from one thread.
  virtual void record_step(int32_t step, int32_t rank, double begin, double end) = 0;
};

/// A sequence of several documents, token by token in the order of the text: its id, the id that follows it in its document, and its
/// place in the document, from 0.
struct PackedSequence {
  std::span<int32_t> tokens, targets, positions;  ///< seq_len each
};

/// The sequences of a data set, in the order of training. Implementations are safe to call from several threads.
class BatchSource {
 public:
  virtual ~BatchSource() = default;
  /// Fills `out` with the tokens of sequence number `sequence` (0 is the first of the run): seq_len + 1 ids, of which
  /// the first seq_len are inputs and the last seq_len are targets.
  virtual void sequence(int64_t sequence, std::span<int32_t> out) const = 0;
  /// Fills `out` with sequence number `sequence` of packed documents. A sequence begins with a document, or with the rest of one,
  /// whose positions count from 0 too. A bug where the source knows no documents.
  virtual void packed(int64_t sequence, const PackedSequence& out) const {
    (void)out;
    SHARDLAB_CHECK(false, "packed sequence {} of a source without documents", sequence);
  }
};

/// Monotonic seconds. Injected, so that time-outs and the watchdog are tested without waiting.
class Clock {
 public:
  virtual ~Clock() = default;
  virtual double now() const = 0;
};

}  // namespace shardlab
