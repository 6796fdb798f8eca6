// Recompute by budget. Each layer keeps its activations, makes them again, or parks them in host memory, such that a step takes the
// least time within a budget of device memory.
//
// A plan knows no seconds, so the choice is made here, where costs are known, and written into the case as a list by layer
// (plan/treatment.h). It is visible and stored, and lowered like a list that somebody wrote by hand.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plan/base/result.h"
#include "plan/case.h"
#include "plan/plan.h"
#include "plan/treatment.h"
#include "simulator/interpreter/case_plan.h"

namespace shardlab::simulator {

class PlacedCostModel;

/// A treatment and the seconds that a step of one micro-batch takes longer for each layer that has it, than with none.
struct PricedTreatment {
  LayerTreatment treatment;
  double seconds = 0;
};

/// The treatments of a layer that go with the case's other techniques: nothing, everything, or any set of sub-layers is made again; each also
/// parked.
std::vector<LayerTreatment> candidate_treatments(const Case& config);

/// Prices by the timeline of probes. A probe has four layers, all under one treatment, the batch and tp of the case and nothing
/// else of its layout. The last layer of a parked treatment stays on the device, so the copies of three layers are exposed. The
/// effect of an op on the rest of the step (a pipeline's bubble, a reduction that is hidden behind it) is not priced.
/// Formula: (T(4 * t) - T(4 * none)) / 4, and for copies (T(4 * t@cpu) - T(4 * t)) / 3 more; never below 0.
/// Refuses what `lower` refuses.
Result<std::vector<PricedTreatment>> price_treatments(const Case& config, std::span<const LayerTreatment> treatments,
                                                      const Lower& lower, const PlacedCostModel& costs);

/// Bytes of one rank.
struct ByteBudget {
  int64_t device = 0;
  int64_t host = INT64_MAX;
};

/// The most assignments whose peak is evaluated on one stage; after that the best of them is taken.
inline constexpr int64_t kMostLookedAt = 6000;

struct BudgetChoice {
  std::vector<LayerTreatment> layers;  ///< of the model
  double seconds = 0;                  ///< that the layers add together, of one micro-batch
  int64_t peak_bytes = 0;              ///< of the stage with the highest
  int64_t looked_at = 0;               ///< assignments whose peak was evaluated
  bool proven = true;                  ///< false where a stage had more near-equal assignments than are looked at
};

/// The assignment of treatments to layers with the least sum of seconds among those whose peak, by the folds of
/// plans (stage_peaks.h), is at most the budget on every stage; of equals one with the lower peak.
///
/// Method: stages are independent. On each, branch and bound over how many layers have which treatment: what is left to assign
///   costs at least the lower convex hull of (bytes kept, seconds) at the bytes that are left, where the least that an assignment
///   can need is what lives for the whole step and what its layers keep of all micro-batches in flight. A treatment that another
///   one beats in bytes, moments and seconds is left out. Layers under one treatment stand together, those that keep least
///   first: the layer that goes back first finds its activations there anyhow, so that keeping them there costs least. Where
///   some are parked, whose storage is still there while their neighbour works, every order of the groups is looked at. A stage
///   whose assignments lie too close together to be told apart within `kMostLookedAt` has the best of those (`proven`).
/// Refuses, with the least bytes that are possible, a budget below them (ExitCode::kNo). `config` must pass `check`; its own
/// recompute and budget are not looked at.
/// Source: the multiple-choice knapsack of Jain et al., "Checkmate" (2020), on a chain of equal layers, where counts are enough.
Result<BudgetChoice> choose_within(const Case& config, const ByteBudget& budget, std::span<const PricedTreatment> priced,
                                   const Lower& lower);

/// The case with that choice in place of its recompute and offload of activations.
Case decided(Case config, std::span<const LayerTreatment> layers);

}  // namespace shardlab::simulator
