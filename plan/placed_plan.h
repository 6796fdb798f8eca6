// A plan with all that is derived from it: its programs, and their places in memory.
#pragma once

#include <memory>
#include <vector>

#include "plan/memory.h"
#include "plan/plan.h"
#include "plan/program.h"

namespace shardlab {

/// Every role's program, expanded and placed: what `Session`, `simulate` and `analyse` share. Moves `plan` in, so that the
/// pointers inside stay valid.
struct PlacedPlan {
  std::unique_ptr<const Plan> plan;
  std::vector<Program> programs;    ///< by role
  std::vector<ArenaLayout> arenas;  ///< by role
};
PlacedPlan place(Plan plan);

}  // namespace shardlab
