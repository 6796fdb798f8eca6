// Rotary position embedding on the q and k rows of a fused qkv activation.
// Source: Su et al. 2021 (RoFormer); pairs (i, i + d/2) as Llama's Hugging Face weights.
#pragma once

#include <cstdint>

#include "plan/base/token_order.h"

namespace shardlab::kernels {

/// F, or I with `backward` (rotates back). In place. Shapes: qkv[sequences,tokens,kv_heads*(heads/kv_heads+2)*head_dim], rows
/// grouped by kv head: its query heads, one key, one value (the value is left alone). Token t has position position_begin + t.
/// Flops: 6 a rotated pair. Bytes: 8 an element of q and k.
struct Rope {
  float* qkv = nullptr;
  int64_t sequences = 1, tokens = 0;
  int heads = 0, kv_heads = 0, head_dim = 0;  ///< heads on this rank; head_dim even
  int64_t position_begin = 0;
  float theta = 10000.0f;
  bool backward = false;
  const float* table = nullptr;  ///< rope_table(...)'s [tokens, head_dim/2, 2], or null: computed as it goes (slower)
  /// Of packed documents: token t of sequence b has position positions[b * positions_stride + t], and the table has a row for each
  /// position.
  const int32_t* positions = nullptr;
  int64_t positions_stride = 0;
};

/// Cosine and sine of p * theta^(-2i/head_dim), in fp64 and rounded -> table[tokens, head_dim/2, 2]. p is the position of the token at
/// the place `begin` + t of a sequence of `total` tokens.
void rope_table(int64_t begin, int64_t tokens, int head_dim, float theta, float* table, const TokenOrder& order = {},
                int64_t total = 0);

}  // namespace shardlab::kernels
