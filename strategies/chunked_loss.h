// Head and loss in pieces of a micro-batch, so that logits are never whole.
#pragma once

#include "strategies/draft.h"

namespace shardlab::strategies {

void chunk_loss(Draft& draft);

}  // namespace shardlab::strategies
