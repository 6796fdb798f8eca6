#pragma once
namespace shardlab {
struct Draft;
/// See accumulation.cpp.
void accumulate(Draft& draft);
}  // namespace shardlab
