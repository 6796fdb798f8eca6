#pragma once
namespace shardlab {
struct Draft;
/// See tensor_parallel.cpp.
void tensor_parallel(Draft& draft);
}  // namespace shardlab
