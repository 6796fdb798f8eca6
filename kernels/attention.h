// Causal attention core over a fused qkv activation, with grouped-query heads.
// Source: Vaswani et al. 2017; Ainslie et al. 2023 (GQA); backward from the saved log-sum-exp as Dao et al. 2022.
#pragma once

#include <cstdint>

namespace shardlab::kernels {

/// The shape shared by F and I. qkv[sequences,tokens,kv_heads*(heads/kv_heads+2)*head_dim]: rows grouped by kv head (its query
/// heads, one key, one value).
struct AttentionShape {
  int64_t sequences = 1, tokens = 0;
  int heads = 0, kv_heads = 0, head_dim = 0;  ///< heads on this rank; kv_heads divides heads
  [[gnu::always_inline]] constexpr int64_t qkv_width() const { return int64_t{heads + 2 * kv_heads} * head_dim; }
  [[gnu::always_inline]] constexpr int64_t out_width() const { return int64_t{heads} * head_dim; }
};

/// F. Shapes: qkv -> o[sequences,tokens,heads*head_dim], lse[sequences,heads,tokens] (log of the sum of exponentials of a row's
/// scores). Flops: 2 sequences heads tokens (tokens + 1) head_dim. Works on four query rows at a time: no S x S matrix.
struct AttentionForward {
  AttentionShape shape;
  const float* qkv = nullptr;
  float* o = nullptr;
  float* lse = nullptr;
  void* scratch = nullptr;  ///< attention_scratch_bytes(...) bytes, aligned to 64
};

/// I. Shapes: dout (like o), o, lse, qkv -> dqkv (like qkv, all of it overwritten). Flops: 2.5 times F's.
struct AttentionInput {
  AttentionShape shape;
  const float* dout = nullptr;
  const float* o = nullptr;
  const float* lse = nullptr;
  const float* qkv = nullptr;
  float* dqkv = nullptr;
  void* scratch = nullptr;  ///< attention_scratch_bytes(...) bytes, aligned to 64
};

/// Scratch in bytes: about 4 tokens (2 head_dim + 4) forward, 4 tokens (6 head_dim + 8) backward.
int64_t attention_scratch_bytes(const AttentionForward& a);
int64_t attention_scratch_bytes(const AttentionInput& a);

}  // namespace shardlab::kernels
