#pragma once

#include "strategies/draft.h"

namespace shardlab::strategies {

void expert_parallel(Draft& draft);

}  // namespace shardlab::strategies
