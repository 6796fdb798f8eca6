// The events of a simulated step as calls of segments (reports/timeline_calls.h).
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "plan/plan.h"
#include "plan/program.h"
#include "plan/trace.h"
#include "reports/timeline.h"

namespace shardlab::reports {

/// An instruction as a timeline names it: `label`, its kind and its work.
TimelineOp timeline_op(const Plan& plan, const Instruction& instruction, std::string label);

/// Whether two ranks of one role do the same: each event begins, ends and waits for peers at the same nanosecond.
bool are_alike(std::span<const TraceEvent* const> a, std::span<const TraceEvent* const> b);

/// Folds one stream of one rank after the other; the shapes are those of all.
class CallFolder {
 public:
  /// Adds the ops of shapes to `ops`, which must outlive the folder.
  CallFolder(const Plan& plan, std::vector<TimelineOp>& ops) : plan_(plan), ops_(ops) {}

  /// The calls of a stream, from its events in order of begin. `program` is the rank's, `origin` when the step began.
  std::vector<TimelineCall> fold(const Program& program, std::span<const TraceEvent* const> events, double origin);

  /// Events of a call.
  int32_t events_of(const TimelineCall& call) const { return events_[static_cast<size_t>(call.shape)]; }

  /// Places the ops of the shapes that most calls of `lanes` have, at most `max_ops` of them, and of the others none.
  TimelineCalls take(const std::vector<TimelineLane>& lanes, int64_t max_ops);

 private:
  TimelineCall fold_one(const Program& program, std::span<const TraceEvent* const> events, double origin);
  int32_t segment_of(const Segment* segment);
  int32_t op_of(const Instruction& i);
  int32_t shape_of(CallShape shape);

  const Plan& plan_;
  std::vector<TimelineOp>& ops_;
  TimelineCalls out_;
  std::vector<int32_t> events_;  ///< by shape
  std::map<const Segment*, int32_t> segments_;
  std::map<std::tuple<const void*, int, int>, int32_t> numbers_;  ///< of ops
  std::map<std::pair<int32_t, std::vector<ShapeOp>>, int32_t> shapes_;
};

}  // namespace shardlab::reports
