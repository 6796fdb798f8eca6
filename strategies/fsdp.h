#pragma once

namespace shardlab::strategies {

struct Draft;

void fsdp(Draft& draft);

}  // namespace shardlab::strategies
