// The rows of experts that a prediction takes: drawn from the case's routing, and counted by what counts the rows of a run
// (plan/expert_rows.h). From them follow rows and imbalance by expert and by rank, bytes of the exchanges, and how much longer than an
// even route each rank works and waits.
//
//   const Routing routing = routing_of(config).value();
//   const Routes routes(plan, programs, routing, config.model.experts, true);
//   imbalance_of(routes.layers()).by_rank;
#pragma once

#include <cstdint>
#include <vector>

#include "plan/expert_rows.h"
#include "plan/plan.h"
#include "plan/program.h"
#include "plan/routing.h"
#include "simulator/interpreter/scaled_costs.h"

namespace shardlab::simulator {

/// What an op does with rows of experts.
enum class RowUse : uint8_t { kNone, kWorks, kExchanges };
/// kWorks: what is done to rows that have come to the experts: a grouped product, the activation between two, rounding. kExchanges: an
/// all-to-all of rows. kNone: what is done to the rows of a rank's own tokens, of which there are as many whatever the routes.
RowUse row_use(const Segment& segment, const Op& op);

class Routes {
 public:
  /// Draws the rows of each layer, micro-batch and rank of one step.
  ///
  /// Formula: the tokens of a rank and micro-batch (with a capacity: of a sequence, or of the rank's part of it) are n points at even distances of 1/n on [0, k), of
  ///   which the first is at random; expert e has the points of its part of the line, as long as its share of the tokens. So a draw has each
  ///   expert's share within one row, k different experts a token, and all rows of a micro-batch. The random number depends on layer,
  ///   rank and micro-batch alone. Routes that were recorded on as many ranks, whose tokens chose as many rows (those that were dropped
  ///   too), are taken as they are: of a rank and expert a micro-batch has an equal part of the step's rows, to a row. Others are drawn
  ///   from their shares.
  /// Source: Madow 1949, "On the theory of systematic sampling, II" (Annals of Mathematical Statistics 20): unequal shares without
  ///   replacement.
  /// `by_rank`: `share` tells ranks apart; else each rank has the share of the fullest of its stage.
  /// Valid when: tokens are as many as a plan's types say. A router's own choice varies more from one micro-batch to the next.
  Routes(const Plan& plan, const std::vector<Program>& programs, const Routing& routing, const Experts& experts, bool by_rank);

  /// By step of the plan's period and layer.
  const std::vector<ExpertRows>& layers() const { return layers_; }
  /// Bytes of rows that ranks send each other in a period of the plan, over all ranks. Units: bytes.
  int64_t exchange_bytes() const { return exchange_bytes_; }
  /// Whether ranks share experts in any layer.
  bool exchanges() const { return exchanges_; }

  /// Seconds of an op on `rank` over its seconds where routes are even: its rows over the rows that are expected, of an exchange the more
  /// of what goes out and what comes in. 1 of an op without rows of experts.
  double share(const Instruction& instruction, int rank) const;
  /// The mean over layers and micro-batches of the largest share of a stage's ranks, of ops that do `use`.
  double fullest(RowUse use) const;

 private:
  struct Share {
    float works = 1, exchanges = 1;
    float of(RowUse use) const { return use == RowUse::kWorks ? works : use == RowUse::kExchanges ? exchanges : 1; }
  };
  /// Rows of all owners that cross to other nodes, and that change places, where they go by node; and the tokens that the former are copies of,
  /// each once for each node that it reaches: as many as are expected.
  struct ByNode {
    int64_t across = 0, within = 0, tokens = 0;
  };
  /// A layer of one stage.
  struct Drawn {
    int stage = 0, layer = 0, micro_batches = 0;
    std::vector<Share> shares;    ///< by micro-batch and, where ranks are told apart, by owner
    std::vector<Share> most;      ///< by micro-batch
    std::vector<int64_t> moved;   ///< by micro-batch: rows that go from one owner to another
    std::vector<ByNode> by_node;  ///< by micro-batch: the same rows
    int copies = 1;               ///< ranks that have the tokens of one owner
    size_t owners = 0;            ///< index into `owners_`
  };
  const Drawn* find(int stage, int layer) const;

  const Plan& plan_;
  bool by_rank_ = false, exchanges_ = false;
  int64_t exchange_bytes_ = 0;
  std::vector<Drawn> drawn_;
  std::vector<RowOwners> owners_;
  std::vector<ExpertRows> layers_;
};

/// A cost model whose ops of experts' rows take as long as on the fullest rank of a stage: for simulations in which one rank stands for
/// its stage. Others wait for that rank at each exchange.
class RoutedCosts final : public ScaledCostModel {
 public:
  /// `costs` must outlive this. Seconds of ops with rows of experts are multiplied, by their use.
  RoutedCosts(const PlacedCostModel& costs, double works, double exchanges)
      : ScaledCostModel(costs), works_(works), exchanges_(exchanges) {}

 private:
  double factor_of(const Instruction& instruction) const override;
  double works_, exchanges_;
};

}  // namespace shardlab::simulator
