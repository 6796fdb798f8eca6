#pragma once

namespace shardlab::strategies {
struct Draft;

/// See pipeline.cpp.
void pipeline(Draft& draft);

}  // namespace shardlab::strategies
