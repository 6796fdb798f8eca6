// The step of a trace that represents all steps, and a trace of that step alone.
#pragma once

#include "plan/trace.h"

namespace shardlab {

/// Number of the step whose length is the median; with an even number of steps, the upper of the two in the middle. A step is as
/// long as its longest rank, which is the time that results report. 0 where the trace has no step.
int median_step(const Trace& trace);

/// A trace of one step, numbered 0.
Trace only_step(const Trace& trace, int step);

}  // namespace shardlab
