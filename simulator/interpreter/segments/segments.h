// The timeline on segment level: a step of whole stretches of segments instead of single instructions.
//
// What `simulate` (simulator/interpreter/timeline.h) does op by op is done here for whole stretches (condense.h): where a stretch
// has its device to itself, its end is one formula; beside other ops it runs along a profile (beside.h). A plan is condensed once
// and priced as often as one likes: GPT-3 175B on 8 stages with 64 micro-batches takes about 0.4 ms a machine, 200 times less than
// op by op.
//
// The two agree to rounding where nothing runs beside the control streams, and where what does is on one device; run.cpp's head
// says what is left out beyond that, tests/segments how much it comes to. There is one representative a stage, as in `simulate` of
// large meshes, and no trace: what is told of a step are the figures below.
#pragma once

#include <span>
#include <vector>

#include "plan/machine.h"
#include "plan/trace.h"
#include "simulator/interpreter/cost_model.h"
#include "simulator/interpreter/segments/condense.h"
#include "simulator/interpreter/segments/run.h"

namespace shardlab::simulator {

/// One period of the plan (usually one step), of the stage that ends last; the first of equals.
struct SegmentStep {
  double seconds = 0;
  int stage = 0;
  Breakdown breakdown;  ///< as `analyse` of that stage's trace; kinds take even turns within a stretch
  IdleBreakdown idle;   ///< as `idle_by_cause`; what the host holds up within a stretch is `other_s`
  /// Exposed seconds by communicator of the plan; they add up to `breakdown.exposed_comm_s`. Where several communicate at once, a
  /// second belongs to the communicator of the control stream, else to one whose peers have arrived.
  std::vector<double> exposed_by_comm_s;
};

class SegmentTimeline {
 public:
  /// Condenses the plan, which must outlive this. It must have passed `verify` and `check_runnable`. `programs` are indexed by role
  /// and are not needed afterwards. A cost model that differs by stage needs `kByStage`, which takes longer to price.
  SegmentTimeline(const Plan& plan, std::span<const Program> programs, segments::Compute compute = segments::Compute::kAlike);
  /// The timeline of a plan whose programs nobody has expanded.
  explicit SegmentTimeline(const Plan& plan, segments::Compute compute = segments::Compute::kAlike);

  /// The step at the costs of a machine whose ranks have a device each. `machine.local` is a bug: its ranks share cores, and
  /// `simulate` knows how.
  SegmentStep step(const Machine& machine, const PlacedCostModel& costs);

  int64_t instructions() const { return text_.instructions; }
  int64_t entries() const { return text_.entries(); }
  /// Moments of the last step at which something began or ended.
  int64_t events() const { return times_.events; }

 private:
  SegmentTimeline(const Plan& plan, segments::Condensed text, segments::Compute compute);

  const Plan& plan_;
  segments::Compute compute_;
  segments::Condensed text_;
  segments::Times times_;  ///< of the last step, kept for its storage
};

/// How a plan is condensed for a machine.
inline segments::Compute compute_on(const Machine& machine) {
  return machine.is_mixed() ? segments::Compute::kByStage : segments::Compute::kAlike;
}

namespace segments {

/// The breakdown of the seconds of stage `stage`.
SegmentStep break_down(const Plan& plan, const Condensed& text, const Prices& prices, const Times& times, int stage);

}  // namespace segments
}  // namespace shardlab::simulator
