#pragma once
namespace shardlab::strategies {
struct Draft;
/// See context_parallel.cpp.
void context_parallel(Draft& draft);
}  // namespace shardlab::strategies
