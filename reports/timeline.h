// The timeline of one case: what each stream of each rank did in one step, measured above predicted.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plan/plan.h"
#include "plan/program.h"
#include "plan/trace.h"
#include "reports/live_bytes.h"
#include "reports/pipeline_grid.h"
#include "reports/timeline_calls.h"

namespace shardlab::reports {

/// An op that intervals or shapes refer to.
struct TimelineOp {
  std::string
      label;  ///< of an interval "layers.3 m2 layer.F attn.qkv linear.F"; of a shape, whose call says the rest, "attn.qkv linear.F"
  std::string kind;  ///< "linear.F"
  double flops = 0;
  double memory_bytes = 0;
  double payload_bytes = 0;
};

struct TimelineInterval {
  int32_t op = -1;     ///< into Timeline::ops, -1 for none
  double begin_s = 0;  ///< from the start of the step
  double end_s = 0;
  double peer_wait_s = 0;  ///< of these, waiting for a peer
  bool wait = false;       ///< the stream waited for a dependency of the op
};

/// One stream of one rank: intervals where the step was measured, else calls.
struct TimelineLane {
  int rank = 0;
  int stage = 0;
  std::string stream;
  std::vector<TimelineInterval> measured;
  std::vector<TimelineInterval> predicted;
  std::vector<TimelineCall> calls;  ///< predicted, in order of time
  int alike = 1;                    ///< ranks of the stage, this one among them, that do the same at the same nanosecond
};

/// One rank of the pipeline's grid.
struct TimelineRow {
  int rank = 0;
  int stage = 0;
  std::vector<GridSlot> measured;
  std::vector<GridSlot> predicted;
};

struct Timeline {
  std::string case_id;
  std::string label;
  std::vector<TimelineOp> ops;
  TimelineCalls calls;
  std::vector<TimelineLane> lanes;  ///< by rank, then by stream
  std::vector<TimelineRow> rows;    ///< of the first rank of each stage, by stage
  std::vector<LiveCurve> live;      ///< of the same ranks, placed in time by the measured trace, else by the predicted one
  bool made_anew = false;           ///< simulated for the report, not in the run
  int measured_step = -1;           ///< which step of the trace is shown
  int64_t left_out = 0;             ///< ops and waits left out to respect the limits
  double shown_s = 0;  ///< where the first ranks of stages have too many: what begins later on them is left out; 0: nothing is
};

struct TimelineOptions {
  /// Ranks with lanes: the first of each stage, then further ones.
  int max_ranks = 16;
  /// Intervals of measured and predicted together. Beyond it ranks are left out that are not the first of their stage, last ones
  /// first, and then the last intervals of those that are.
  int64_t max_intervals = 60'000;
  /// Calls of a step that was not measured, likewise.
  int64_t max_calls = 200'000;
  /// Ops of its shapes; the shapes of the fewest calls are not placed.
  int64_t max_shape_ops = 50'000;
  /// Slots of a row, of measured and predicted each.
  size_t max_slots = 4000;
};

/// Builds the timeline of a case from its traces, either of which may be null. Of the measured trace, the step of median duration
/// is shown, as intervals above which the predicted ones stand. A predicted trace alone is shown by calls, and of ranks that do the
/// same one stands for all. A rank that the predicted trace lacks does what the first rank of its role in that trace does.
/// `programs` are indexed by role. The caller sets `case_id` and `label`.
Timeline make_timeline(const Plan& plan, const std::vector<Program>& programs, const Trace* predicted, const Trace* measured,
                       const TimelineOptions& options = {});

}  // namespace shardlab::reports
