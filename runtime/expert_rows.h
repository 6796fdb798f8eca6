// How many rows each expert worked at in a step, counted where its weights had their gradients: once for each layer and micro-batch,
// whatever forward ran again. What is counted is what routers chose and exchanges moved; no plan has a buffer or an op for it. Rows that
// routers chose and no expert worked at were dropped.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "plan/program.h"

namespace shardlab::runtime {

/// The rows of one layer with experts, in one step.
struct ExpertRows {
  int layer = 0;
  std::vector<int64_t> by_expert;  ///< over all ranks that have other tokens
  std::vector<int64_t> by_rank;    ///< of ranks that share the experts, in order, slices of one expert once; else empty
  int64_t from_others = 0;         ///< rows that came from another rank than the one that works at them, slices once
  int step = 0;                    ///< of the plan's period
  int64_t dropped = 0;             ///< rows that were chosen, and that no expert had room for
  friend bool operator==(const ExpertRows&, const ExpertRows&) = default;
};

/// A layer that the program of a role has experts of, in one step of the plan's period.
struct CountedLayer {
  int step = 0, layer = 0;
  const Type* counts = nullptr;  ///< i32[1, parts, experts of the rank], placed over the groups of experts
  int sources = 1;               ///< ranks whose parts of the tokens are counted, one after another
  size_t first = 0;              ///< where its numbers begin among those of the role
  int64_t chosen = 0;            ///< rows that the rank's own tokens choose in a micro-batch
  /// Numbers that are kept of it: rows by expert of the rank, those that came from other ranks, and those that its own tokens chose.
  size_t numbers() const { return static_cast<size_t>(counts->shape.last()) + 2; }
};

/// The ops of a role's program whose rows are counted: of each layer's gradients of weights of experts one a micro-batch.
class RowCounting {
 public:
  RowCounting(const Plan& plan, const Role& role, const Program& program);
  /// By step and layer, ascending.
  std::span<const CountedLayer> layers() const { return layers_; }
  /// Of all of them.
  size_t numbers() const { return numbers_; }
  /// The index of the instruction's step and layer, or -1.
  int of(const Instruction& instruction) const;

 private:
  std::vector<CountedLayer> layers_;
  size_t numbers_ = 0;
  std::vector<std::pair<int32_t, int32_t>> counted_;  ///< ids of instructions, ascending, and the index of what each counts
};

/// Adds what the counts say to the layer's `numbers`; `own` is the rank's place among the sources.
void add_rows(const int32_t* counts, const CountedLayer& layer, int64_t own, std::span<int64_t> numbers);

/// What one rank has counted of a layer.
struct RankRows {
  Coordinates at;
  CountedLayer layer;
  std::span<const int64_t> numbers;
};
/// By step and layer, of all ranks in order.
std::vector<ExpertRows> expert_rows(const Mesh& mesh, std::span<const RankRows> ranks);

/// The largest over the mean: 1 where all have as many. None of no rows.
std::optional<double> imbalance(std::span<const int64_t> rows);

/// Means over layers, and steps, of `imbalance` by expert, and by rank. Less 1 they are MaxVio of Wang et al. 2024 ("Auxiliary-Loss-Free Load
/// Balancing", section 4.1).
struct Imbalance {
  std::optional<double> by_expert, by_rank;
};
Imbalance imbalance_of(std::span<const ExpertRows> layers);

/// Rows of a step's layers that were chosen, and those of them that were dropped.
struct Drops {
  int64_t chosen = 0, dropped = 0;
  double share() const { return chosen > 0 ? static_cast<double>(dropped) / static_cast<double>(chosen) : 0; }
};
Drops drops_of(std::span<const ExpertRows> layers);

}  // namespace shardlab::runtime
