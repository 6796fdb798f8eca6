#pragma once

#include "strategies/draft.h"

namespace shardlab::strategies {

void whole_experts(Draft& draft);

}  // namespace shardlab::strategies
