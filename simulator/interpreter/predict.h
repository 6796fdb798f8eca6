// From a lowered case to the figures of results.csv: step time, its parts, memory and wire bytes.
#pragma once

#include <array>
#include <vector>

#include "plan/outcome.h"
#include "plan/program.h"
#include "plan/routing.h"
#include "plan/trace.h"
#include "simulator/interpreter/cost_model.h"

namespace shardlab::simulator {

class SegmentTimeline;

struct Predicted {
  Prediction figures;
  Trace trace;  ///< of one period of the plan
};

/// Puts a role's peaks into the prediction wherever they are above those of the roles before it.
void add_peaks(const std::array<MemoryPeak, kSpaces>& peaks, Prediction& prediction);

/// Sets the seconds of a step of `plan` by segments; `timeline` is made from `plan`. The machine is not local.
void add_segment_times(const Plan& plan, SegmentTimeline& timeline, const Machine& machine, const PlacedCostModel& costs,
                       Prediction& prediction);
/// Whether an op's cost was extrapolated, and by which calibration costs are.
void add_provenance(const Case& config, const Plan& plan, const PlacedCostModel& costs, Prediction& prediction);

/// What the routing makes of a case with experts, as far as it is known without a plan: imbalance by expert and by rank.
void add_routing(const Case& config, const Routing& routing, Prediction& prediction);

/// Adds the seconds of a step's second run (expert_bound): the step takes both, one after the other.
void add_second_run(const Prediction& second, Prediction& prediction);

/// Predicts one step of `plan` on `config.machine`; the mean step, if the plan's period has several. `programs` are indexed by role
/// and got arena offsets from `place_arena`; `arena_bytes` is the device-space size on the rank with the largest arena. Times are
/// of the rank with the longest step, `compute_s` and `exposed_comm_s` as `analyse` (plan/trace.h) has them. `extrapolated` is set
/// if any op's cost was not interpolated, or if the case asks for more threads a rank than were calibrated. `routing` is the case's
/// (`routing_of`): rows of experts are drawn from it (Routes), unless it is even.
Predicted predict(const Case& config, const Plan& plan, const std::vector<Program>& programs, int64_t arena_bytes,
                  const PlacedCostModel& costs, const Routing& routing = {});

/// The same figures by segments (simulator/interpreter/segments), for the longest stage; its ranks all do the same. The machine
/// is not local.
Prediction predict_by_segments(const Case& config, const Plan& plan, const std::vector<Program>& programs, int64_t arena_bytes,
                               const PlacedCostModel& costs, const Routing& routing = {});

/// Memory, wire bytes and what the routing makes of them, without seconds: `add_peaks` and this.
void add_wire(const Case& config, const Plan& plan, const std::vector<Program>& programs, const Routing& routing,
              Prediction& prediction);

}  // namespace shardlab::simulator
