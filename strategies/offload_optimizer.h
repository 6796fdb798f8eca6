#pragma once

#include "strategies/draft.h"

namespace shardlab::strategies {

/// See offload_optimizer.cpp.
void offload_optimizer(Draft& draft);
/// One update a bucket, for layouts without ZeRO whose optimizer works on the host: what travels together is updated together.
void update_every_bucket(Draft& draft, StageDraft& stage);

}  // namespace shardlab::strategies
