// One trace type with several producers: the executor's recorder, the simulator, later CUPTI. Every report is a fold over it.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

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
};

struct Trace {
  std::string producer;  ///< "executor", "simulator"
  int world_size = 0;
  int steps = 0;
  std::vector<std::string> streams;
  std::vector<TraceEvent> events;                    ///< grouped by rank, in order of begin
  std::vector<std::array<double, 2>> step_interval;  ///< by step * world_size + rank: begin and end of the step on the rank
  int64_t dropped = 0;
  double recorder_overhead_s = 0;  ///< of recording one event, measured
};

/// Where a step's wall time went on one rank. Compute, communication and waits are unions of intervals.
struct Breakdown {
  double wall_s = 0;
  double compute_s = 0;        ///< union of compute ops
  double comm_s = 0;           ///< union of communication ops
  double exposed_comm_s = 0;   ///< communication not covered by compute
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

/// Chrome trace-event JSON (open in Perfetto): one process per rank, one thread per stream.
std::string to_chrome_json(const Plan& plan, const std::vector<Program>& programs, const Trace& trace);

}  // namespace shardlab
