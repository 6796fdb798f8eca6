#pragma once
namespace shardlab::strategies {
struct Draft;
/// See clip_norm.cpp.
void clip_norm(Draft& draft);
}  // namespace shardlab::strategies
