// The rows of q, k and v of multi-head latent attention, put together and taken apart.
// Source: DeepSeek-AI, "DeepSeek-V2" (2024), section 2.1, equations 9 to 19: a head of q is [q^C, rotated q^R], of k [k^C, rotated k^R],
// where k^R is one for all heads. Pairs (i, i + rope/2) are rotated, as in rope.h.
#pragma once

#include <cstdint>

namespace shardlab::kernels {

/// Sizes and angles of consecutive tokens. A head of q and k has `nope` elements and then `rope` rotated ones, of v `values`.
struct LatentHeads {
  int64_t rows = 0;
  int heads = 0;  ///< on this rank
  int nope = 0, rope = 0, values = 0;
  const float* table = nullptr;  ///< rope_table(...)'s [.., rope/2, 2]: of row t, or, with positions, of position positions[t]
  const int32_t* positions = nullptr;
  [[gnu::always_inline]] constexpr int64_t depth() const { return int64_t{nope} + rope; }
  [[gnu::always_inline]] constexpr int64_t q_width() const { return heads * depth(); }
  [[gnu::always_inline]] constexpr int64_t kv_width() const { return int64_t{heads} * (nope + values); }
  [[gnu::always_inline]] constexpr int64_t qkv_width() const { return heads * (2 * depth() + values); }
};

/// F. Shapes: q[rows,heads*(nope+rope)], kv[rows,heads*(nope+values)] (by head a key's part and a value), k_rope[rows,rope] ->
/// qkv[rows,heads*(2(nope+rope)+values)]. Flops: 3 rope (heads + 1) a row.
void latent_heads_forward(const LatentHeads& a, const float* q, const float* kv, const float* k_rope, float* qkv);

/// I. Shapes: dqkv -> dq, dkv, dk_rope as above. dk_rope: the canonical tree over the heads of what each rotates back. Flops: 7 rope heads
/// a row.
void latent_heads_input(const LatentHeads& a, const float* dqkv, float* dq, float* dkv, float* dk_rope);

}  // namespace shardlab::kernels
