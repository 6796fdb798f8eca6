// Where the experts of a layer lie on the ranks that share them. The e experts of rank r have the places r e to r e + e - 1; a placement says
// which expert is at which place. Routers choose among experts by number, whatever the placement: what follows the placement is the
// choice that they write (places), counts of rows, and the order in which a rank holds weights. Without a placement expert i is at place i.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace shardlab {

/// The experts of one layer in the order of their places.
struct ExpertPlacement {
  int layer = 0;
  std::vector<int32_t> experts;  ///< by place
  std::vector<int32_t> places;   ///< by expert; empty where `experts` names an expert twice or not at all
  friend bool operator==(const ExpertPlacement&, const ExpertPlacement&) = default;
};

/// The placement with `experts` by place.
ExpertPlacement place_experts(int layer, std::vector<int32_t> experts);

/// What keeps a placement from being one of `count` experts ("expert 3 has two places"); empty where nothing does.
std::string placement_fault(const ExpertPlacement& placement, int64_t count);

/// The placement of a layer; null: its experts lie in order. `placements` ascend by layer.
const ExpertPlacement* placement_of(std::span<const ExpertPlacement> placements, int layer);

/// The layer whose experts dim 0 of a parameter counts, by the parameter's name ("layers.3.moe.wup"); none of other parameters.
std::optional<int> layer_of_expert_weight(std::string_view parameter);

/// "1:2,0,3,1 3:1,0,2,3": of each layer the experts by place. Layers that are not named have their experts in order.
std::string print_placements(std::span<const ExpertPlacement> placements);
/// Reads what `print_placements` writes; none for another text, or for layers that do not ascend.
std::optional<std::vector<ExpertPlacement>> read_placements(std::string_view text);

/// Loads of `ranks` ranks under a placement (null: experts in order) where the experts have `loads`: the largest over the mean. 1 of no loads.
double imbalance_under(const ExpertPlacement* placement, std::span<const double> loads, int ranks);

/// A placement by which the ranks' loads are near each other. Formula: experts from the largest load down, of equal loads the lower number
/// first, each to the rank with the least load of those with fewer than their share of experts, of equal loads the lower rank. Then the fullest
/// rank and another exchange two experts, as long as the larger of both loads falls: of all exchanges the one that leaves the least, of equal
/// ones the first as experts were dealt out. A rank has its experts in ascending order.
/// Source: Graham 1969, "Bounds on multiprocessing timing anomalies" (longest processing time first), with as many jobs for each machine. The
/// exchanges mend what equal numbers spoil: a rank with one large load is left with jobs when all others are full.
ExpertPlacement balanced_placement(int layer, std::span<const double> loads, int ranks);

/// The least part by which a new placement must lower the load of a layer's fullest rank to take the place of the present one.
inline constexpr double kLeastPlacementGain = 0.02;

/// `balanced_placement` where it lowers the fullest rank's load by `kLeastPlacementGain` of it or more, else `present` (null: experts in
/// order). None: the experts lie in order.
std::optional<ExpertPlacement> placement_after(int layer, std::span<const double> loads, int ranks, const ExpertPlacement* present);

}  // namespace shardlab
