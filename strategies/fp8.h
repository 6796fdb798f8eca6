#pragma once
namespace shardlab::strategies {
struct Draft;
/// See fp8.cpp: the layers' matrix products take factors of 8 bits.
void multiply_in_fp8(Draft& draft);
/// Delayed scaling: makes the scales of the step from the sizes of past steps, and keeps the sizes of this step for later ones.
void remember_amax(Draft& draft);
}  // namespace shardlab::strategies
