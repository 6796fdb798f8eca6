// Shared by the attention kernels: the places of heads in a row, and the two tasks of a block.
//
// Forward (Dao 2023): a block has a tile of queries and walks over the tiles of keys that they see. Per row it keeps the
// largest score m and the sum l of exp(score - m), and rescales its sums when m grows. Backward: p = exp(score - lse) is
// computed again. One kernel walks as forward does and sums dq. Another has a tile of keys, walks over the queries that see
// them, and sums dk and dv.
#pragma once

#include "kernels/cuda/launch.h"

namespace shardlab::gpu::SHARDLAB_GPU_VARIANT {

/// One sequence's view of one head. Offsets in elements from the sequence's first row of qkv.
struct Head {
  int64_t query, key, value;
  int64_t stride;  ///< of a row of qkv
};

SHARDLAB_DEVICE Head head_of(const AttentionShape& s, int64_t head) {
  const int64_t queries = s.heads / s.kv_heads, group = head / queries, first = group * (queries + 2) * s.head_dim;
  return {first + head % queries * s.head_dim, first + queries * s.head_dim, first + (queries + 1) * s.head_dim, s.qkv_width()};
}

/// 1 / sqrt(head_dim).
SHARDLAB_DEVICE float score_scale(const AttentionShape& s) { return 1.0f / ::sqrtf(static_cast<float>(s.head_dim)); }

inline constexpr float kLog2E = 1.4426950408889634f;

}  // namespace shardlab::gpu::SHARDLAB_GPU_VARIANT
