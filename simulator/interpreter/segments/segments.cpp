#include "simulator/interpreter/segments/segments.h"

#include <algorithm>
#include <utility>

#include "plan/base/check.h"
#include "plan/runnable.h"

namespace shardlab::simulator {

SegmentTimeline::SegmentTimeline(const Plan& plan, std::span<const Program> programs, segments::Compute compute)
    : SegmentTimeline(plan, segments::condense(plan, programs, compute), compute) {}
SegmentTimeline::SegmentTimeline(const Plan& plan, segments::Compute compute)
    : SegmentTimeline(plan, segments::condense(plan, compute), compute) {}

SegmentTimeline::SegmentTimeline(const Plan& plan, segments::Condensed text, segments::Compute compute)
    : plan_(plan), compute_(compute), text_(std::move(text)) {
  const Result<void> runnable = check_runnable(plan);
  SHARDLAB_CHECK(runnable.ok(), "{}", to_string(runnable.error()));
}

SegmentStep SegmentTimeline::step(const Machine& machine, const PlacedCostModel& costs) {
  SHARDLAB_CHECK(!machine.local, "the ranks of machine `{}` share its cores", machine.id);
  SHARDLAB_CHECK(compute_ == segments::Compute::kByStage || !costs.differs_by_stage(),
                 "plan `{}` is condensed as if its stages computed alike", plan_.name);
  segments::Prices prices(plan_, text_, costs);
  segments::run(text_, prices, times_);
  const auto last = std::ranges::max_element(times_.ends);
  return segments::break_down(plan_, text_, prices, times_, static_cast<int>(last - times_.ends.begin()));
}

}  // namespace shardlab::simulator
