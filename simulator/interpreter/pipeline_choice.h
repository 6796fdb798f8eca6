// What of a pipeline is chosen where costs are known: how many layers each part has (`stage_layers: balanced`), and the order of slots
// (`schedule: auto`). A plan knows no seconds, so the choice is written into the case, as a list and a name or a table: visible, stored,
// and lowered like one that somebody wrote by hand.
#pragma once

#include <array>
#include <functional>
#include <vector>

#include "plan/base/result.h"
#include "plan/case.h"
#include "plan/pipeline_schedule.h"
#include "plan/plan.h"

namespace shardlab::simulator {

class PlacedCostModel;

/// What one micro-batch takes on a rank, in seconds.
struct SlotSeconds {
  double forward = 0, input = 0, weight = 0;
  double all() const { return forward + input + weight; }
};

/// The units of a case, and a message between neighbouring stages.
struct UnitSeconds {
  SlotSeconds embedding, layer, head;
  double hop = 0;
};

/// From the ops of a probe of two stages, each op alone on its rank: what overlaps within a unit is not seen. Layers that are treated one
/// by one count as keeping all.
/// Refuses what `lower` does.
Result<UnitSeconds> unit_seconds(const Case& config, const std::function<Result<Plan>(const Case&)>& lower, const PlacedCostModel& costs);

/// Layers of each part such that the longest part is as short as can be, with the embedding in the first and the head in the last; these
/// two may have none, the others at least one. Of equals the one whose longer parts come later: a stage that is full first waits
/// longest for its gradients. `parts` is at most `layers`.
std::vector<int> balanced_layers(int parts, int layers, const UnitSeconds& seconds);

/// What slots of parts with these layers take.
SlotCosts slot_costs(const std::vector<int>& layers, const UnitSeconds& seconds);

/// A schedule that `auto` may take, with its predicted time.
struct PipelineCandidate {
  PipelineSchedule schedule;
  Schedule named = Schedule::kTable;
  int virtual_stages = 1;   ///< of the key `vpp`
  std::vector<int> layers;  ///< of each part
  double seconds = 0;       ///< of a step's slots
  double held = 0;          ///< activations of the stage that holds most, in those of a whole stage
};

/// The named schedules that go with the case's stages and layers, each with balanced parts, and list schedules that may hold half as
/// much as 1F1B, as much, 1.5 times and twice as much; the shortest first, of equals the one that holds less.
std::vector<PipelineCandidate> pipeline_candidates(const Case& config, const UnitSeconds& seconds);

}  // namespace shardlab::simulator
