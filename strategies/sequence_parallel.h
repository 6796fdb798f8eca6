#pragma once
namespace shardlab::strategies {
struct Draft;
/// See sequence_parallel.cpp.
void sequence_parallel(Draft& draft);
}  // namespace shardlab::strategies
