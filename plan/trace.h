// One trace type with several producers: the executor's recorder, the simulator, a GPU's records. Every report is a fold over it.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "plan/idle.h"
#include "plan/plan.h"

namespace shardlab {

inline constexpr int kTraceVersion = 1;

/// One interval of one rank. Times are seconds from the start of the step, on one clock for all ranks of the trace.
struct TraceEvent {
  enum class Kind : uint8_t {
    kOp,    ///< an instruction ran
    kWait,  ///< its stream waited for a dependency or, within a collective, for peers
  } kind = Kind::kOp;
  int32_t rank = 0;
  int32_t instruction = -1;  ///< Instruction::id of the rank's role
  int32_t stream = 0;
  int32_t step = 0;
  double begin = 0;
  double end = 0;
  double peer_wait = 0;    ///< of a collective or p2p op: seconds of [begin, end] spent waiting for a peer to arrive
  int64_t sent_bytes = 0;  ///< counted where they were sent
  double queued = -1;      ///< of device work: seconds from its launch by the host to `begin`; negative: no launch apart from it
};

/// How complete a device's records are, and how its clock was read. All zero for traces that no device told.
/// Always: launches == recorded + lost, and device_records == timed + zero_timestamp + out_of_range + unclaimed.
struct TraceAccounting {
  std::string clock;           ///< whose clock the events come from: "CUPTI", "CUDA events"; empty: the executor's own
  double clock_error_s = 0;    ///< of placing the device's times on the session's clock, at most
  int64_t launches = 0;        ///< pieces of work that the host handed to the device, as the host counted them
  int64_t recorded = 0;        ///< launches with a record of the device
  int64_t lost = 0;            ///< launches without a record
  int64_t dropped = 0;         ///< records that the tracer says it dropped
  int64_t unreadable = 0;      ///< buffers of records that could not be read to their end
  int64_t device_records = 0;  ///< of kernels, copies and fills
  int64_t timed = 0;           ///< records that the trace's events are made of
  int64_t zero_timestamp = 0;  ///< records whose times the driver lost
  int64_t out_of_range = 0;    ///< records outside every step that was kept
  int64_t unclaimed = 0;       ///< records of no op
  int64_t ops = 0;             ///< ops that handed work to the device
  int64_t ops_untimed = 0;     ///< ops of these without an event in the trace
};

/// The differences that the accounting leaves unexplained, as sentences that name the figures. Empty if every launch has its record
/// and every record its op.
std::vector<std::string> unexplained(const TraceAccounting& accounting);

/// One interval beneath the ops, as a device's own records tell it: a kernel, a copy, a synchronisation, a cost of the tracer. Only
/// the export reads it.
struct TraceDetail {
  int32_t rank = -1;         ///< -1: of no op
  int32_t instruction = -1;  ///< -1: of no op
  int32_t step = 0;
  int32_t lane = 0;  ///< into Trace::detail_lanes
  int32_t name = 0;  ///< into Trace::detail_names
  double begin = 0;  ///< as of TraceEvent
  double end = 0;
  int64_t bytes = 0;
};

struct Trace {
  std::string producer;  ///< "executor", "simulator", "cupti", "cuda-events"
  int world_size = 0;
  int steps = 0;
  std::vector<std::string> streams;
  std::vector<TraceEvent> events;                    ///< grouped by rank, in order of begin
  std::vector<std::array<double, 2>> step_interval;  ///< by step * world_size + rank: begin and end of the step on the rank
  int64_t dropped = 0;
  double recorder_overhead_s = 0;  ///< of recording one event, measured
  TraceAccounting accounting;
  std::vector<std::string> detail_lanes, detail_names;
  std::vector<TraceDetail> details;  ///< not written by `write_trace_lines`
};

/// Where a step's wall time went on one rank. Compute, communication, copies and waits are unions of intervals. A copy here is one
/// between memory spaces (device, host, NVMe); one within a space is compute like any op.
/// wall_s == compute_s + exposed_comm_s + exposed_copy_s + wait_s + unplanned_s.
struct Breakdown {
  double wall_s = 0;
  double compute_s = 0;        ///< union of compute ops
  double comm_s = 0;           ///< union of communication ops
  double exposed_comm_s = 0;   ///< communication not covered by compute
  double copy_s = 0;           ///< union of copies
  double exposed_copy_s = 0;   ///< copies covered by neither compute nor communication
  double wait_s = 0;           ///< dependency waits not covered by any op
  double unplanned_s = 0;      ///< wall less the union of every op and wait
  double bubble_fraction = 0;  ///< share of wall in which the compute stream ran nothing because its pipeline input was missing
};

struct Program;

/// Breakdown of one rank in one step. `programs` are indexed by role.
///
/// Everything is clipped to the rank's step interval. A communication op counts as communication from its begin to its end, the
/// wait for its peers included. The bubble is made of those waits of the compute stream whose last dependency to finish is a
/// receive, up to the moment when that receive had its sender (its begin plus its `peer_wait`), and of the peer waits of receives
/// on the compute stream itself.
Breakdown analyse(const Plan& plan, const std::vector<Program>& programs, const Trace& trace, int rank, int step);

/// One joined row of predicted and measured for one instruction: medians over steps, summed over ranks of the role. The wait for
/// peers is no part of an op's time here: it belongs to what the peers were doing. Where a trace has only some ranks of a role (a
/// simulated representative), their sum is scaled up to all of them.
struct JoinedOp {
  int role = 0;
  int32_t instruction = -1;
  std::string label;
  double predicted_s = 0;
  double measured_s = 0;
};

/// Joins two traces on (rank, instruction), in order of role and instruction. Events of one side without the other are reported
/// with 0 on the missing side.
std::vector<JoinedOp> join(const Plan& plan, const std::vector<Program>& programs, const Trace& predicted, const Trace& measured);

/// Why nothing ran on one rank in one step.
IdleBreakdown idle_by_cause(const Plan& plan, const std::vector<Program>& programs, const Trace& trace, int rank, int step);

/// Chrome trace-event JSON (open in Perfetto): one process per rank, one thread per stream and, below, per detail lane. Details
/// that overlap on a lane go to further lanes: a viewer may drop what overlaps.
std::string to_chrome_json(const Plan& plan, const std::vector<Program>& programs, const Trace& trace);

}  // namespace shardlab
