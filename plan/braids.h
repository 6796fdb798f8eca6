// Which slots of a pipeline two micro-batches share, piece by piece: `expert_overlap: micro-batches` (strategies/expert_overlap.cpp).
#pragma once

#include <vector>

#include "plan/case.h"
#include "plan/pipeline_schedule.h"

namespace shardlab {

struct Braids {
  std::vector<std::vector<bool>> with_next;  ///< by stage and slot: the slot begins and ends together with the next slot
  ScheduleTimes times;                       ///< when the slots run, if F, I and W take one unit of time each, and messages none

  bool any() const;
};

/// The schedule with no slots braided.
Braids unbraided(const PipelineSchedule& schedule);

/// The schedule with braids. A braid is two neighbouring slots: a forward of one micro-batch and the backward of another.
///
/// A single stage braids all neighbours of this kind. A stage of a pipeline braids a forward with the backward behind it. It does so
/// everywhere if the step becomes no longer. Otherwise it does so where the forward can wait for the gradient: the next stage must have the
/// output of the forward no later than the schedule without braids uses the output. 1f1b, whose forwards cannot wait, has no braids: stages
/// would run in lockstep, and a step of many micro-batches would take up to twice as long. If two braids would wait for each other, one is
/// left out.
Braids braided(const PipelineSchedule& schedule);

/// Whether any slots of the case's pipeline are braided. The pipeline must be decided, and `check_pipeline` must accept it.
bool has_braids(const Case& c);

}  // namespace shardlab
