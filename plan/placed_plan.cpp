#include "plan/placed_plan.h"

#include <utility>

namespace shardlab {

PlacedPlan place(Plan plan) {
  PlacedPlan placed;
  placed.plan = std::make_unique<const Plan>(std::move(plan));
  for (size_t role = 0; role < placed.plan->roles.size(); ++role) {
    placed.programs.push_back(expand_program(*placed.plan, static_cast<int>(role)));
    placed.arenas.push_back(place_arena(*placed.plan, placed.programs.back()));
  }
  return placed;
}

}  // namespace shardlab
