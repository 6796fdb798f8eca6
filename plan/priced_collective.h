// A collective of a plan with its algorithm, and the predicted seconds of every algorithm that its group could use. `explain` and the report's
// page show it for `collective_algorithm`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plan/op.h"

namespace shardlab {

struct PricedCollective {
  std::string op;     ///< label with its segment: "layer.B gradients"
  std::string kind;   ///< "all_reduce"
  std::string comm;   ///< communicator: "dp.grads"
  int ranks = 0;      ///< ranks of a group
  int nodes = 1;      ///< nodes that a group spans
  int64_t bytes = 0;  ///< bytes of the whole buffer
  int64_t runs = 0;   ///< runs in a step, on the rank with the most
  Algorithm algorithm = Algorithm::kRing;
  /// Predicted seconds of one run, alone on the machine.
  struct Price {
    Algorithm algorithm = Algorithm::kRing;
    double seconds = 0;
    friend bool operator==(const Price&, const Price&) = default;
  };
  /// Prices of all algorithms that the group can use, the cheapest first. A kind without a choice (an all-to-all) has the price of its own
  /// algorithm only. Empty on this machine, where `auto` is a rule and no prediction.
  std::vector<Price> prices;
  friend bool operator==(const PricedCollective&, const PricedCollective&) = default;
};

}  // namespace shardlab
