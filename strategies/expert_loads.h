#pragma once

#include <string_view>

#include "strategies/draft.h"

namespace shardlab::strategies {

/// The loss for even use of experts is of whole sequences: where ranks along `axes` route parts of them, how many of their tokens go to each
/// expert, b e numbers for a layer and micro-batch, is summed over the parts. Nothing without such a loss. `strategy` adds the ops.
void sum_loads(Draft& draft, AxisSet axes, std::string_view strategy);

}  // namespace shardlab::strategies
