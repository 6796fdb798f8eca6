// RMSNorm over each head of q and of k of a fused qkv activation; values pass as they are. Orders of sums: docs/canonical-order.md.
// Source: Henry et al. 2020; as in Qwen3.
#pragma once

#include "kernels/kernels.h"

namespace shardlab::kernels {

/// Rows of a token: by kv head its query heads, one key, one value, each of head_dim. `stats`[rows(tokens), heads + kv_heads] holds 1/rms, by kv
/// head of its query heads and of its key.
struct HeadNormShape {
  Tokens tokens;
  int heads = 0, kv_heads = 0, head_dim = 0;  ///< heads on this rank
};

/// F. qkv, gamma_q[head_dim], gamma_k[head_dim] -> y, stats. Flops: 4 an element of q and k.
struct HeadNormForward {
  HeadNormShape shape;
  const float* qkv = nullptr;
  const float* gamma_q = nullptr;
  const float* gamma_k = nullptr;
  float* y = nullptr;
  float* stats = nullptr;
  float epsilon = 1e-5f;
};
/// I. dy, qkv, gammas, stats -> dqkv. Flops: 7 an element of q and k.
struct HeadNormInput {
  HeadNormShape shape;
  const float* dy = nullptr;
  const float* qkv = nullptr;
  const float* gamma_q = nullptr;
  const float* gamma_k = nullptr;
  const float* stats = nullptr;
  float* dqkv = nullptr;
};
/// W. dy, qkv, stats -> dgamma_q, dgamma_k; with `accumulate` added to what they hold. `apart`: sums of each sequence are not added up, one
/// (1), or one for each leaf of it that the tokens are of: dgamma[sequences,apart,head_dim]. Flops: 3 an element of q and k.
struct HeadNormWeight {
  HeadNormShape shape;
  const float* dy = nullptr;
  const float* qkv = nullptr;
  const float* stats = nullptr;
  float* dgamma_q = nullptr;
  float* dgamma_k = nullptr;
  bool accumulate = false;
  int64_t apart = 0;
  void* scratch = nullptr;  ///< head_norm_scratch_bytes(...) bytes, aligned to 64
};

void head_norm_forward(const Kernels& k, const HeadNormForward& a);
void head_norm_input(const Kernels& k, const HeadNormInput& a);
void head_norm_weight(const Kernels& k, const HeadNormWeight& a);

int64_t head_norm_scratch_bytes(const HeadNormShape& shape);

}  // namespace shardlab::kernels
