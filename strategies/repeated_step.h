// The timetable of a step repeated within a period of several (`Plan::period`).
#pragma once

#include <map>
#include <vector>

#include "strategies/draft.h"

namespace shardlab::strategies {

/// A view of element `step` of a buffer that has an element for each step of the period.
BufferId element_of(StageDraft& stage, BufferId of, int step);

/// Appends the events of one step, its number in the period `number`. A buffer that `instead` maps is bound as what it maps to.
void repeat_step(StageDraft& stage, const std::vector<Event>& step, int number, const std::map<BufferId, BufferId>& instead);

}  // namespace shardlab::strategies
