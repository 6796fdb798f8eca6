#include "simulator/interpreter/segments/segments.h"

#include <algorithm>
#include <utility>

#include "plan/base/check.h"
#include "plan/runnable.h"

namespace shardlab::simulator {

SegmentTimeline::SegmentTimeline(const Plan& plan, std::span<const Program> programs)
    : SegmentTimeline(plan, segments::condense(plan, programs)) {}
SegmentTimeline::SegmentTimeline(const Plan& plan) : SegmentTimeline(plan, segments::condense(plan)) {}

SegmentTimeline::SegmentTimeline(const Plan& plan, segments::Condensed text) : plan_(plan), text_(std::move(text)) {
  const Result<void> runnable = check_runnable(plan);
  SHARDLAB_CHECK(runnable.ok(), "{}", to_string(runnable.error()));
}

SegmentStep SegmentTimeline::step(const Machine& machine, const PlacedCostModel& costs) {
  SHARDLAB_CHECK(!machine.local, "the ranks of machine `{}` share its cores", machine.id);
  segments::Prices prices(plan_, text_, costs);
  segments::run(text_, prices, times_);
  const auto last = std::ranges::max_element(times_.ends);
  return segments::break_down(plan_, text_, prices, times_, static_cast<int>(last - times_.ends.begin()));
}

}  // namespace shardlab::simulator
