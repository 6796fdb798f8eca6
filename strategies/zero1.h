#pragma once
namespace shardlab {
struct Draft;
/// See zero1.cpp.
void zero1(Draft& draft);
}  // namespace shardlab
