#pragma once
namespace shardlab {
struct Draft;
/// See mixed_precision.cpp.
void mixed_precision(Draft& draft);
/// The fp32 copies that the optimizer updates.
void master_weights(Draft& draft);
}  // namespace shardlab
