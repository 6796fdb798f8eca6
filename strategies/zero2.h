#pragma once

namespace shardlab::strategies {

struct Draft;

void zero2(Draft& draft);

}  // namespace shardlab::strategies
