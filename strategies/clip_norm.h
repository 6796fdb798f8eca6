#pragma once
namespace shardlab {
struct Draft;
/// See clip_norm.cpp.
void clip_norm(Draft& draft);
}  // namespace shardlab
