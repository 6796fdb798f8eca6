#pragma once
namespace shardlab {
struct Draft;
/// See data_parallel.cpp.
void data_parallel(Draft& draft);
}  // namespace shardlab
