// The step of a case on one rank, unsharded: parameters, units, and the forward and backward segment of each unit kind.
#pragma once

#include "strategies/draft.h"

namespace shardlab::strategies {

/// Builds what has to be computed. `training` false gives the forward segments with losses only.
Draft build_step(const Case& config, bool training);

}  // namespace shardlab::strategies
