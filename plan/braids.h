// Which slots of a pipeline two micro-batches share, piece by piece: `expert_overlap: micro-batches` (strategies/expert_overlap.cpp).
#pragma once

#include <vector>

#include "plan/case.h"
#include "plan/pipeline_schedule.h"

namespace shardlab {

struct Braids {
  std::vector<std::vector<bool>> with_next;  ///< by stage and slot: it begins and ends with the next one
  ScheduleTimes times;                       ///< when the slots run, if F, I and W take one unit of time each, and messages none

  bool any() const;
};

/// The schedule with no slots braided.
Braids unbraided(const PipelineSchedule& schedule);

/// The schedule with braids: slots in a row, a forward of one micro-batch and the gradients of another.
///
/// One stage braids whatever there is. A stage of a pipeline braids a forward with the gradients behind it: everywhere, if that makes the
/// step no longer; else where the forward can wait for the gradient, so that the next stage has its output no later than the schedule
/// without braids uses it there. 1f1b, whose forwards cannot wait, has no braids: stages would go in lockstep, and a step of many
/// micro-batches take up to twice as long. Where two braids would wait for each other, one is left out.
Braids braided(const PipelineSchedule& schedule);

/// Whether any slots of the case's pipeline are braided. The pipeline is decided, and `check_pipeline` lets it pass.
bool has_braids(const Case& c);

}  // namespace shardlab
