#pragma once
namespace shardlab {
struct Draft;
/// See recompute.cpp.
void full_recompute(Draft& draft);
}  // namespace shardlab
