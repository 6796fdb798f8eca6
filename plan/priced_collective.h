// A collective of a plan with its algorithm, and what each algorithm that its group could have is predicted to take: what `explain` and the
// report's page say of `collective_algorithm`.
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
  int ranks = 0;      ///< of a group
  int nodes = 1;      ///< that a group spans
  int64_t bytes = 0;  ///< of the whole buffer
  int64_t runs = 0;   ///< in a step, of the rank that runs it most
  Algorithm algorithm = Algorithm::kRing;
  /// Predicted seconds of one run, alone on the machine.
  struct Price {
    Algorithm algorithm = Algorithm::kRing;
    double seconds = 0;
    friend bool operator==(const Price&, const Price&) = default;
  };
  /// Of each algorithm that the group can have, the least first; where the kind leaves no choice (an exchange of all with all), of its own
  /// alone. Empty on this machine, where `auto` is a rule and no prediction.
  std::vector<Price> prices;
  friend bool operator==(const PricedCollective&, const PricedCollective&) = default;
};

}  // namespace shardlab
