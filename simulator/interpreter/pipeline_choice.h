// Two choices about a pipeline that need costs: the number of layers of each part (`stage_layers: balanced` by predicted costs,
// `stage_layers: measured` by the times of a run), and the order of slots (`schedule: auto`). A plan knows no seconds, so the choice
// is written into the case, as a list and a name or a table. It is visible and stored, and lowered like a choice that somebody wrote
// by hand.
#pragma once

#include <array>
#include <functional>
#include <vector>

#include "plan/base/result.h"
#include "plan/case.h"
#include "plan/pipeline_schedule.h"
#include "plan/plan.h"
#include "plan/program.h"
#include "plan/trace.h"

namespace shardlab::simulator {

class PlacedCostModel;

/// Seconds of one micro-batch on a rank, by slot.
struct SlotSeconds {
  double forward = 0, input = 0, weight = 0;
  double all() const { return forward + input + weight; }
};

/// The units of a case, and a message between neighbouring stages.
struct UnitSeconds {
  SlotSeconds embedding, layer, head;
  double hop = 0;
};

/// Seconds of the units on the devices of each stage, `pp` of them. On a mixed machine a stage's units take what they take on its own kind
/// of device, and the longest over its kinds where its ranks lie on several; `hop` is the slowest of all links, those between kinds
/// included. Refuses what `unit_seconds` and `cost_model_for` refuse.
Result<std::vector<UnitSeconds>> stage_unit_seconds(const Case& config, const std::function<Result<Plan>(const Case&)>& lower);

/// Seconds of the units, from the ops of a probe of two stages, each op alone on its rank: overlap within a unit is not seen.
/// Layers with a treatment each count as keeping all. Refuses what `lower` refuses.
Result<UnitSeconds> unit_seconds(const Case& config, const std::function<Result<Plan>(const Case&)>& lower,
                                 const PlacedCostModel& costs);

/// Seconds of the units by part, from those by stage: a part that several stages compute, as under a mirrored schedule, has the longest of
/// each.
std::vector<UnitSeconds> part_unit_seconds(const PipelineSchedule& schedule, const std::vector<UnitSeconds>& by_stage);

/// Layers of each part such that the longest part is as short as can be, with the embedding in the first part and the head in the
/// last. These two may have no layers, the others have at least one. Of equal solutions the one with the longer parts later: a
/// stage that is full first waits longest for its gradients. `parts` is at most `layers`.
std::vector<int> balanced_layers(int parts, int layers, const UnitSeconds& seconds);
/// The same where the units of each part take seconds of their own. `most`: layers that each part has room for, which together are at
/// least `layers`; empty: there is room for all.
std::vector<int> balanced_layers(int layers, const std::vector<UnitSeconds>& parts, const std::vector<int>& most = {});

/// Seconds of a step, all its micro-batches, that the units of a model took in a run.
struct MeasuredSeconds {
  double embedding = 0;
  std::vector<double> layers;  ///< by layer: a run's layers need not be alike
  double head = 0;
};

/// Seconds of the units in `trace`, whose events lie on the instructions of `programs`: of each op the median over steps and the mean
/// over the ranks of its role, without waits for peers, summed over the ops of the unit. As in `unit_seconds` overlap within a unit is
/// not seen; copies between memory spaces, which run beside it, are left out. Refuses a trace in which a layer has no time.
Result<MeasuredSeconds> measured_seconds(const Plan& plan, const std::vector<Program>& programs, const Trace& trace);

/// Layers of each part by the seconds of each layer: the longest part is as short as can be, and of the deals with such a longest part
/// the one with the least sum of squares of the parts' seconds is taken. So parts that are not the longest are even too. The parts that
/// may be empty, and the choice among equals, are those of the other `balanced_layers`. `parts` is at most the number of layers.
std::vector<int> balanced_layers(int parts, const MeasuredSeconds& seconds);

/// The times of slots of parts with these layers.
SlotCosts slot_costs(const std::vector<int>& layers, const UnitSeconds& seconds);
/// The same where the units of each part take seconds of their own.
SlotCosts slot_costs(const std::vector<int>& layers, const std::vector<UnitSeconds>& parts);

/// A schedule that `auto` may take, with its predicted time.
struct PipelineCandidate {
  PipelineSchedule schedule;
  Schedule named = Schedule::kTable;
  int virtual_stages = 1;   ///< of the key `vpp`
  std::vector<int> layers;  ///< of each part
  double seconds = 0;       ///< of a step's slots
  double held = 0;          ///< activations of the stage that holds most, counted in activations of a whole stage
};

/// The named schedules that go with the case's stages and layers, each with balanced parts, and list schedules that may hold half as
/// much as 1F1B, as much, 1.5 times and twice as much; the shortest first, of equals the one that holds less.
std::vector<PipelineCandidate> pipeline_candidates(const Case& config, const UnitSeconds& seconds);
/// The same where the units take seconds of their own on each stage.
std::vector<PipelineCandidate> pipeline_candidates(const Case& config, const std::vector<UnitSeconds>& by_stage);

}  // namespace shardlab::simulator
