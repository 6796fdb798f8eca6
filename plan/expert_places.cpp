#include "plan/expert_places.h"

#include <set>
#include <variant>

namespace shardlab {

std::vector<const ExpertPlacement*> placements_of(const Plan& plan, const Role& role) {
  std::set<int> layers;
  for (const Item& item : role.program)
    if (const Call* call = std::get_if<Call>(&item)) layers.insert(call->layer);
  std::vector<const ExpertPlacement*> placements;
  for (const ExpertPlacement& placement : plan.expert_placement)
    if (layers.contains(placement.layer)) placements.push_back(&placement);
  return placements;
}

std::optional<int64_t> expert_places_at(const Plan& plan, const Role& role, int layer) {
  int64_t at = 0;
  for (const ExpertPlacement* placement : placements_of(plan, role)) {
    if (placement->layer == layer) return at;
    at += 2 * static_cast<int64_t>(placement->experts.size());
  }
  return std::nullopt;
}

int64_t expert_places_elements(const Plan& plan, const Role& role) {
  int64_t elements = 0;
  for (const ExpertPlacement* placement : placements_of(plan, role))
    elements += 2 * static_cast<int64_t>(placement->experts.size());
  return elements;
}

}  // namespace shardlab
