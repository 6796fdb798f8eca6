#pragma once

#include "strategies/draft.h"

namespace shardlab::strategies {

/// See offload_optimizer.cpp.
void offload_optimizer(Draft& draft);
/// Adds one update for each bucket, for layouts without ZeRO whose optimizer works on the host.
void update_every_bucket(Draft& draft, StageDraft& stage);

}  // namespace shardlab::strategies
