// Optimizers, elementwise, in place.
#pragma once

#include <cstdint>

namespace shardlab::kernels {

/// param[n] -= learning_rate * (grad[n] + weight_decay * param[n]). Bytes: 12n.
struct Sgd {
  const float* grad = nullptr;
  float* param = nullptr;
  int64_t n = 0;
  float learning_rate = 0;
  float weight_decay = 0;
};

/// Decoupled weight decay, bias-corrected. `step` counts optimizer steps from 0. Bytes: 28n.
/// Source: Loshchilov & Hutter 2019.
struct AdamW {
  const float* grad = nullptr;
  float* param = nullptr;
  float* m = nullptr;
  float* v = nullptr;
  int64_t n = 0;
  int64_t step = 0;
  float learning_rate = 0;
  float beta1 = 0.9f, beta2 = 0.95f, epsilon = 1e-8f;
  float weight_decay = 0;
};

}  // namespace shardlab::kernels
