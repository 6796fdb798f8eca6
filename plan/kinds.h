// Mixed machines: which kinds of devices the ranks of a stage lie on, and what every device of the machine has.
//
// Ranks fill nodes in order, and the pipeline axis of a mesh is its slowest: the ranks of a stage are neighbours. So a machine whose
// first two nodes are of one kind and whose last two are of another gives the first two of four stages to the first kind.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plan/base/result.h"
#include "plan/case.h"
#include "plan/machine.h"
#include "plan/mesh.h"

namespace shardlab {

/// Sets the fields of a mixed machine that follow from its kinds: `nodes` is their sum, `devices_per_node` is the first kind's, and
/// `device` has the least of each rate and of the memory, the precisions that all kinds have a peak for, and the default of every further
/// constant. Its provenance stays: it is that of the links between kinds.
void join_kinds(Machine& machine);

/// Indices into `Machine::kinds`: the first and the last of neighbours.
struct KindRange {
  int first = 0, last = 0;
  bool one() const { return first == last; }
  friend bool operator==(KindRange, KindRange) = default;
};

/// Kinds that the ranks `first` to `last` of a mixed machine lie on. Ranks beyond the machine's devices count as of the last kind.
KindRange kinds_of_ranks(const Machine& machine, int first, int last);

/// Kinds that the ranks of pipeline stage `stage` lie on. The pipeline axis of `mesh` must be its slowest, as it is in every case's plan.
KindRange kinds_of_stage(const Machine& machine, const Mesh& mesh, int stage);
/// The same by the layout of the case. The machine is mixed.
KindRange kinds_of_stage(const Case& c, int stage);

/// The device of a stage's ranks: "h100-sxm5-80gb", and "h100-sxm5-80gb + a100-sxm4-80gb" where the stage lies on several kinds.
std::string device_of_stage(const Case& c, int stage);

/// Device-space bytes that one rank of a stage may use: on a mixed machine the memory of the stage's smallest device, else
/// `memory_per_rank`.
int64_t memory_of_stage(const Case& c, int stage);

/// Refuses a mixed machine whose own fields were changed apart from its kinds, and choices that are made for devices of one kind (recompute
/// within a budget, layers dealt by measured times). Any other machine passes.
Result<void> check_kinds(const Case& c);

}  // namespace shardlab
