#pragma once
namespace shardlab::strategies {
struct Draft;
/// See weight_average.cpp.
void average_weights(Draft& draft);
}  // namespace shardlab::strategies
