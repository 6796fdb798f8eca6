// Plans of several optimizer steps (`Plan::period`): which step of its period an instruction belongs to.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/idle.h"
#include "plan/plan.h"

namespace shardlab {

/// By index of an item of the role's program: the step of the period, from 0, of a Call; 0 of what is no call.
///
/// A period repeats what a step does: the n-th call of a segment for one layer and micro-batch, or, where it works for no
/// micro-batch, on the same buffers, is of step n (of the last, where there are more). What is done once a period, as an outer
/// step, is so of step 0: nothing in it may depend on the step.
std::vector<int32_t> steps_of_calls(const Plan& plan, const Role& role);

/// What a step has of bytes that the whole period sends: the mean, to the nearest byte.
constexpr int64_t bytes_of_step(const Plan& plan, int64_t bytes_of_period) {
  return (bytes_of_period + plan.period / 2) / plan.period;
}

/// What a step has of the idle time of a whole period.
IdleBreakdown idle_of_step(const Plan& plan, IdleBreakdown idle);

}  // namespace shardlab
