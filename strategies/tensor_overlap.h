#pragma once
namespace shardlab::strategies {
struct Draft;
/// See tensor_overlap.cpp.
void tensor_overlap(Draft& draft);
}  // namespace shardlab::strategies
