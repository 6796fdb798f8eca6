// Where a rank's tokens stand in the text, by the plan's order of tokens.
#pragma once

#include <vector>

#include "runtime/backend.h"

namespace shardlab::runtime {

/// The positions of the tokens along dim 1 of what the rank holds.
inline std::vector<int64_t> positions_of(const BoundOp& op, const Type& type) {
  const int64_t begin = logical_origin(type, op.mesh(), op.at)[1], total = logical_shape(type, op.mesh())[1];
  std::vector<int64_t> positions(static_cast<size_t>(type.shape[1]));
  for (size_t t = 0; t < positions.size(); ++t)
    positions[t] = op.plan->token_order.position(begin + static_cast<int64_t>(t), total);
  return positions;
}

}  // namespace shardlab::runtime
