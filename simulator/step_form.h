// Seconds of one step of shardlab's own executor from the configuration alone, on a machine known by its data sheet: no plan is
// built, no instruction simulated.
//
// The witness of the timeline, as closed_form is of a plan's bytes: what each kernel does follows from the formulas of a layer,
// what is sent from buckets and shards, when from the rules of the papers, written a second time. The timeline simulates what
// lowering wrote; tests/agreement holds the two together.
#pragma once

#include <optional>

#include "plan/case.h"
#include "simulator/datasheet_rates.h"
#include "simulator/step_walk.h"

namespace shardlab::simulator {

/// Formula: kernels by flops and bytes as plan/work.h counts them, at DatasheetRates; blocks of them in the order of the pipeline's
///   timetable; collectives beside them as simulator/step_walk.h has it. Ranks of a stage do the same and are walked as one.
/// Units: seconds.
/// Nothing where `has_step_form` says so. `check` must pass.
std::optional<forms::Walked> step_form(const Case& c, const DatasheetRates& rates);

/// Whether the step of the case has a closed form of time: on a machine known by its data sheet, with all that the analytic
/// estimate knows; recompute within a budget once it is decided (plan/treatment.h).
bool has_step_form(const Case& c);

}  // namespace shardlab::simulator
