// Placements of experts as a GPU's kernels read them: a buffer of a role, i32, filled before the first step.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "plan/plan.h"

namespace shardlab {

inline constexpr const char* kExpertPlaces = "expert.places";

/// The placements of the layers that the role computes, by layer. Each has a table in the buffer, in this order: the place of each expert, then
/// the expert at each place.
std::vector<const ExpertPlacement*> placements_of(const Plan& plan, const Role& role);

/// The element of the buffer at which the table of a layer begins; none where its experts lie in order.
std::optional<int64_t> expert_places_at(const Plan& plan, const Role& role, int layer);

/// Elements of the buffer: 2 E for each placed layer.
int64_t expert_places_elements(const Plan& plan, const Role& role);

}  // namespace shardlab
