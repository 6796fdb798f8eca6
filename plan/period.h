// Plans of several optimizer steps (`Plan::period`): which step of its period an instruction belongs to.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/idle.h"
#include "plan/plan.h"

namespace shardlab {

/// For each item of the role's program, by index: the step of the period that a Call belongs to, counted from 0; 0 for items that
/// are no call.
///
/// A period repeats the calls of a step. The n-th call of a segment for one layer and micro-batch belongs to step n, or to the last
/// step if there are more calls than steps. For a segment without a micro-batch, calls on the same buffers are counted. A call that
/// happens once a period (an outer step) belongs to step 0 and must not depend on the step.
std::vector<int32_t> steps_of_calls(const Plan& plan, const Role& role);

/// The bytes of one step: the mean over a period, to the nearest byte.
constexpr int64_t bytes_of_step(const Plan& plan, int64_t bytes_of_period) {
  return (bytes_of_period + plan.period / 2) / plan.period;
}

/// The idle time of one step: the mean over a period.
IdleBreakdown idle_of_step(const Plan& plan, IdleBreakdown idle);

}  // namespace shardlab
