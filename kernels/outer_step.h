// The outer optimizer of workers that train apart: SGD with Nesterov momentum on the mean of how far they came.
// Source: Douillard et al., "DiLoCo" (2023), algorithm 1, lines 12 to 14; Nesterov's momentum as Sutskever et al. (2013) write it.
#pragma once

#include <cstdint>

namespace shardlab::kernels {

/// With g = share * delta[i]: without velocity value[i] = start[i] - learning_rate * g; with it velocity[i] = momentum *
/// velocity[i] + g, then value[i] = start[i] - learning_rate * (g + momentum * velocity[i]). value may be delta. Every product and
/// sum is rounded to fp32. Flops: 3n, or 7n with velocity. Bytes: 12n, or 20n.
struct OuterStep {
  const float* delta = nullptr;  ///< sum over the workers of start less own
  const float* start = nullptr;  ///< what all workers began with
  float* velocity = nullptr;     ///< or null: no momentum
  float* value = nullptr;
  int64_t n = 0;
  float share = 1;  ///< 1 / workers
  float learning_rate = 1;
  float momentum = 0;
};
void outer_step(const OuterStep& a);

}  // namespace shardlab::kernels
