// A plan with all that is derived from it: its programs, and their places in memory.
#pragma once

#include <memory>
#include <vector>

#include "plan/base/result.h"
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

/// Lays two plans of one mesh in the same arenas. Each arena is as large as the larger one of the two plans. Buffers that outlive a step have one
/// place in both plans, and between steps no other buffer is live. Refuses two plans whose buffers that outlive a step differ.
Result<void> share_arenas(PlacedPlan& a, PlacedPlan& b);

}  // namespace shardlab
