// The timeline of one case: what each stream of each rank did in one step, measured above predicted.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plan/plan.h"
#include "plan/program.h"
#include "plan/trace.h"

namespace shardlab::reports {

/// An op that intervals refer to.
struct TimelineOp {
  std::string label;  ///< "layers.3 m2 layer.F attn.qkv"
  std::string kind;   ///< "linear.F"
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

/// One stream of one rank.
struct TimelineLane {
  int rank = 0;
  std::string stream;
  std::vector<TimelineInterval> measured;
  std::vector<TimelineInterval> predicted;
};

struct Timeline {
  std::string case_id;
  std::string label;
  std::vector<TimelineOp> ops;
  std::vector<TimelineLane> lanes;  ///< by rank, then by stream
  int measured_step = -1;           ///< which step of the trace is shown
  int64_t left_out = 0;             ///< intervals left out to respect the limit
  double shown_s = 0;               ///< where a single rank has too many: intervals that begin later are left out; 0: none are
};

struct TimelineOptions {
  int max_ranks = 8;
  /// Intervals of measured and predicted together. Beyond it whole ranks are left out, last ones first, and then the last intervals
  /// of the first rank.
  int64_t max_intervals = 60'000;
};

/// Builds the timeline of a case from its traces, either of which may be null. Of the measured trace, the step of median duration
/// is shown. A rank that the predicted trace lacks shows the events of the first rank of its role in that trace. `programs` are
/// indexed by role. The caller sets `case_id` and `label`.
Timeline make_timeline(const Plan& plan, const std::vector<Program>& programs, const Trace* predicted, const Trace* measured,
                       const TimelineOptions& options = {});

}  // namespace shardlab::reports
