// Event simulation of a plan: what each rank's streams do, when, on the resources of a machine.
//
// The simulator follows the instruction lists and waits of plan/program.h exactly as the executor does. Time comes from a
// CostModel; overlap, bubbles and contention are not assumed but follow from the resources:
//
//   cores      the ranks of a local machine share its cores. What a stream does takes one core, which it keeps until it waits or
//              hands it over by the executor's own rules (plan/cores.h). Waits take none.
//   memory     an op's own speed depends on how many cores are busy (CostModel: measured at concurrency 1 and at all cores).
//   devices    on any other machine each rank has a device of its own; the ranks of a local machine whose GPUs were calibrated take
//              them in turn, and may share one. On a device streams run side by side and share multiprocessors, memory bandwidth,
//              links, network and copy engines (simulator/interpreter/resources.h); a meeting is one task, as slow as its slowest
//              member. The host launches instructions in issue order, `dispatch` seconds each, and no op starts before it was
//              launched.
//   peers      on devices a collective moves data once its whole group has arrived, a send and its receive once both have. Between
//              ranks of a local machine they go step by step as the transport does, each member on a core of its own or on one
//              handed over (simulator/interpreter/stepped_meeting.h).
//
// On a local machine `dispatch` is core time before each op; taking over a core costs `handover`, being given one that was idle for
// longer than a stream watches costs `wake`. On devices a stream that had to block starts `wake` seconds after what it waited for,
// or as many as it had waited if those were fewer: it was still spinning.
#pragma once

#include <vector>

#include "plan/machine.h"
#include "plan/plan.h"
#include "plan/program.h"
#include "plan/trace.h"
#include "simulator/interpreter/cost_model.h"

namespace shardlab::simulator {

class Routes;

struct SimulateOptions {
  /// Meshes of more ranks are simulated by one representative rank per role (its coordinates on all other axes are 0): ranks of one
  /// role run one text and nothing distinguishes them. A local machine's ranks share cores and are always simulated one by one.
  int max_individual_ranks = 64;
  /// Whether the ranks of the mesh are simulated one by one.
  bool individually(const Mesh& mesh, const Machine& machine) const {
    return machine.local || mesh.world_size() <= max_individual_ranks;
  }
  /// How many rows each rank's experts work at; null: as many as a plan expects. What an op of rows takes is in proportion to them.
  const Routes* routes = nullptr;
};

/// The predicted trace of one step. `programs` are indexed by role. Events exist for simulated ranks only; `step_interval` for
/// every rank. The plan must have passed `verify` and `check_runnable` (plan/runnable.h). A plan that deadlocks is a bug, and so is
/// a plan whose rows or steps the simulation would count wrong.
Trace simulate(const Plan& plan, const std::vector<Program>& programs, const Machine& machine, const PlacedCostModel& costs,
               const SimulateOptions& options = {});

/// The time of the step: from its start to the end of the last rank.
double step_seconds(const Trace& trace, int step = 0);

/// The rank whose step is longest; the first of equals.
int longest_rank(const Trace& trace, int step = 0);

}  // namespace shardlab::simulator
