#pragma once
namespace shardlab::strategies {
struct Draft;
/// See fp8.cpp: the layers' matrix products take factors of 8 bits.
void multiply_in_fp8(Draft& draft);
/// Of delayed scaling: scales for the step from what past steps saw, and the memory of what this one saw.
void remember_amax(Draft& draft);
}  // namespace shardlab::strategies
