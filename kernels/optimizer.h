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

/// With c = beta1 m + (1 - beta1) grad: param -= learning_rate * (sign(c) + weight_decay * param), where sign is 1 above 0, -1 below it, and
/// c itself where that is 0 or NaN; then m = beta2 m + (1 - beta2) grad. Bytes: 20n. Source: Chen et al. 2023, algorithm 2.
struct Lion {
  const float* grad = nullptr;
  float* param = nullptr;
  float* m = nullptr;
  int64_t n = 0;
  float learning_rate = 0;
  float beta1 = 0.9f, beta2 = 0.99f;
  float weight_decay = 0;
};

/// AdamW on moments in 8 bits (plan/base/moment_codes.h), block by block: both moments are decoded, the step is AdamW's, and each is
/// encoded again by its new largest size. m[n], v[n], m_scale[blocks], v_scale[blocks], scratch[2 * kMomentBlock]. Bytes: 16n + 16 a block.
/// Source: Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization".
struct AdamW8bit {
  const float* grad = nullptr;
  float* param = nullptr;
  uint8_t* m = nullptr;
  uint8_t* v = nullptr;
  float* m_scale = nullptr;
  float* v_scale = nullptr;
  float* scratch = nullptr;
  int64_t n = 0;
  int64_t step = 0;
  float learning_rate = 0;
  float beta1 = 0.9f, beta2 = 0.95f, epsilon = 1e-8f;
  float weight_decay = 0;
};

}  // namespace shardlab::kernels
