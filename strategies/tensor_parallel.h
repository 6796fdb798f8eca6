#pragma once
namespace shardlab::strategies {
struct Draft;
/// See tensor_parallel.cpp.
void tensor_parallel(Draft& draft);
}  // namespace shardlab::strategies
