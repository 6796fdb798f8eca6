// How many rows each expert works at in a step. Rows are counted where the gradients of the expert's weights are computed: once for each
// layer and micro-batch, however often forward runs. A rank of a run counts the rows that routers chose and exchanges moved; a prediction
// counts the rows that it has drawn (simulator/interpreter/routes.h). No plan has a buffer or an op for the counts. Rows that routers chose
// and no expert works at are dropped.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "plan/mesh.h"
#include "plan/program.h"

namespace shardlab {

/// The rows of one layer with experts, in one step.
struct ExpertRows {
  int layer = 0;
  std::vector<int64_t> by_expert;  ///< over all ranks that have other tokens
  std::vector<int64_t> by_rank;    ///< of ranks that share the experts, in order, slices of one expert once; else empty
  int64_t from_others = 0;         ///< rows that came from another rank than the one that works at them, slices once
  int step = 0;                    ///< of the plan's period
  int64_t dropped = 0;             ///< rows that were chosen, and that no expert had room for
  /// By rank that has other tokens, in the order of ranks, and by expert: where the rows came from. They add up to `by_expert`.
  std::vector<std::vector<int64_t>> by_source;
  /// `by_rank` of the same rows if experts were contiguous; empty where they are.
  std::vector<int64_t> by_rank_contiguous;
  /// Rows that a rank's experts work at in one micro-batch, over the rows that the tokens of one rank choose in it: the largest of all ranks
  /// and micro-batches, 1 where routes are even. 0 where no ranks share the experts. `RowCounting` may take several micro-batches for one.
  double fullest = 0;
  friend bool operator==(const ExpertRows&, const ExpertRows&) = default;
};

/// A layer that the program of a role has experts of, in one step of the plan's period.
struct CountedLayer {
  int step = 0, layer = 0;
  const Type* counts = nullptr;                ///< i32[1, parts, experts of the rank], placed over the groups of experts
  int sources = 1;                             ///< ranks whose parts of the tokens are counted, one after another
  size_t first = 0;                            ///< where its numbers begin among those of the role
  int64_t chosen = 0;                          ///< rows that the rank's own tokens choose in a micro-batch
  int64_t sequences = 0;                       ///< that a micro-batch has, or has parts of
  int64_t top_k = 0;                           ///< rows that a token chooses
  int64_t capacity = 0;                        ///< rows that an expert takes of a sequence; 0: all
  const Type* choice = nullptr;                ///< i32[sequences, tokens, top_k]: how tokens are dealt to ranks
  int64_t expected = 0;                        ///< rows that the rank's experts work at in a micro-batch where routes are even
  int micro_batches = 0;                       ///< of the step
  int together = 1;                            ///< micro-batches whose rows are one number of `fullest_at`
  const ExpertPlacement* placement = nullptr;  ///< of the plan; null: experts lie in order
  /// The number of the expert at `place`.
  size_t expert_at(size_t place) const { return placement != nullptr ? static_cast<size_t>(placement->experts[place]) : place; }
  /// How many numbers are kept for the layer: rows by source and by expert of the rank; rows that the rank's own tokens chose; and rows that
  /// the rank's experts work at, one number for each `together` micro-batches.
  size_t numbers() const { return worked_at() + static_cast<size_t>((micro_batches + together - 1) / together); }
  size_t chosen_at() const { return static_cast<size_t>(sources * counts->shape.last()); }
  size_t worked_at() const { return chosen_at() + 1; }
};

/// The ranks of one stage by the tokens that they have: ranks that have the same tokens count the same rows, and the first of them
/// stands for all.
struct RowOwners {
  /// `counts` is the type of a layer's counts, `stage` the coordinate along the pipeline axis.
  RowOwners(const Type& counts, const Mesh& mesh, int stage);
  std::vector<int> ranks;                 ///< of the stage that have tokens of their own, ascending: the owners
  std::vector<int> owner;                 ///< by rank of the mesh; -1 in other stages
  std::vector<int> part;                  ///< by owner: the number of its experts' group, which is its place among the sources
  std::vector<std::vector<int>> sources;  ///< by owner: the owners whose rows its experts get, in order of their places
  bool shares = false;                    ///< experts are cut among ranks
  int copies = 1;                         ///< ranks that have the tokens of one owner
};

/// The ops of a role's program at which rows are counted: for each layer and micro-batch one op that makes gradients of experts' weights. Where
/// experts go by counts that are cut off (expert_bound), it is the op that cuts the counts, which reads the counts of all rows that have come.
class RowCounting {
 public:
  /// `together`: neighbouring micro-batches that count as one for the fullest rank. The second run of a step (expert_bound) takes one sequence
  /// at a time: b of its micro-batches have the rows of one micro-batch of b sequences of the first run.
  RowCounting(const Plan& plan, const Role& role, const Program& program, int together = 1);
  /// The counted layers by step and layer, ascending.
  std::span<const CountedLayer> layers() const { return layers_; }
  /// Sum of `CountedLayer::numbers` over all layers.
  size_t numbers() const { return numbers_; }
  /// The index of the instruction's step and layer, or -1.
  int of(const Instruction& instruction) const;
  /// Which operand of such an instruction has the counts.
  static size_t read_of(const Instruction& instruction);

 private:
  std::vector<CountedLayer> layers_;
  size_t numbers_ = 0;
  std::vector<std::pair<int32_t, int32_t>> counted_;  ///< ids of instructions, ascending, and the index of what each counts
};

/// Adds what the counts of a micro-batch say to the layer's `numbers`.
void add_rows(const int32_t* counts, const CountedLayer& layer, int micro_batch, std::span<int64_t> numbers);

/// What one rank has counted of a layer.
struct RankRows {
  Coordinates at;
  CountedLayer layer;
  std::span<const int64_t> numbers;
};
/// The rows by step and layer. `ranks` has what all ranks counted, in the order of ranks.
std::vector<ExpertRows> expert_rows(const Mesh& mesh, std::span<const RankRows> ranks);

/// The largest number of rows over the mean: 1 if all are equal. None if there are no rows.
std::optional<double> imbalance(std::span<const int64_t> rows);

/// Means over layers, and steps, of `imbalance` by expert, and by rank. Less 1 they are MaxVio of Wang et al. 2024 ("Auxiliary-Loss-Free Load
/// Balancing", section 4.1).
struct Imbalance {
  std::optional<double> by_expert, by_rank;
  std::optional<double> by_rank_contiguous;  ///< `by_rank` if experts were contiguous; none where those of all layers are
  std::optional<double> peak;                ///< the largest `fullest` of the layers; none where no ranks share experts
};
Imbalance imbalance_of(std::span<const ExpertRows> layers);

/// Rows of a step's layers that were chosen, and those of them that were dropped.
struct Drops {
  int64_t chosen = 0, dropped = 0;
  double share() const { return chosen > 0 ? static_cast<double>(dropped) / static_cast<double>(chosen) : 0; }
};
Drops drops_of(std::span<const ExpertRows> layers);

}  // namespace shardlab
