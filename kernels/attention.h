// Causal attention with grouped-query heads: over a fused qkv activation, and of a part of a sequence to a part.
// Source: Vaswani et al. 2017; Ainslie et al. 2023 (GQA); backward from the saved log-sum-exp as Dao et al. 2022; parts of a
// sequence as Liu et al. 2023 (ring attention).
#pragma once

#include <array>
#include <cstdint>

#include "plan/base/token_order.h"

namespace shardlab::kernels {

/// The shape shared by F and I. qkv[sequences,tokens,kv_heads*((heads/kv_heads+1)*head_dim+values())]: rows grouped by kv head
/// (its query heads, one key, one value).
struct AttentionShape {
  int64_t sequences = 1, tokens = 0;
  int heads = 0, kv_heads = 0, head_dim = 0;  ///< heads on this rank; kv_heads divides heads
  TokenOrder order{};                         ///< of the tokens; canonical: its parts divide 16
  bool canonical = false;                     ///< the leaves of docs/canonical-order.md, else one
  /// Of packed documents: the place of each token in its document, i32[sequences,tokens], by place in memory. A query sees the keys of
  /// its own document alone. Null: each sequence is one document.
  const int32_t* positions = nullptr;
  int value_dim = 0;   ///< elements of a head of v and o; 0: head_dim
  int64_t window = 0;  ///< w > 0: a query at position i sees no key at a position up to i - w
  [[gnu::always_inline]] constexpr int values() const { return value_dim == 0 ? head_dim : value_dim; }
  /// Of one kv head's query heads, key and value.
  [[gnu::always_inline]] constexpr int64_t group_width() const { return int64_t{heads / kv_heads + 1} * head_dim + values(); }
  [[gnu::always_inline]] constexpr int64_t qkv_width() const { return kv_heads * group_width(); }
  [[gnu::always_inline]] constexpr int64_t out_width() const { return int64_t{heads} * values(); }
};

/// F. Shapes: qkv -> o[sequences,tokens,heads*values()], lse[sequences,heads,tokens] (log of the sum of exponentials of a row's
/// scores). Flops: sequences heads tokens (tokens + 1) (head_dim + values()). Works on four query rows at a time: no S x S matrix.
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

/// Queries at the places [first_query, first_query + queries) of a sequence of `tokens`, keys and values at [first_key, first_key +
/// keys). Where canonical, both are whole leaves.
struct AttentionBlockShape {
  int64_t sequences = 1, queries = 0, keys = 0;
  int heads = 0, kv_heads = 0, head_dim = 0;
  int64_t tokens = 0, first_query = 0, first_key = 0;
  TokenOrder order{};
  bool canonical = false;
  const int32_t* positions = nullptr;  ///< as AttentionShape's, of the whole sequence
  int value_dim = 0;                   ///< as AttentionShape's
  int64_t window = 0;                  ///< as AttentionShape's
  [[gnu::always_inline]] constexpr int values() const { return value_dim == 0 ? head_dim : value_dim; }
  [[gnu::always_inline]] constexpr int64_t q_width() const { return int64_t{heads} * head_dim; }
  [[gnu::always_inline]] constexpr int64_t out_width() const { return int64_t{heads} * values(); }
  [[gnu::always_inline]] constexpr int64_t kv_width() const { return int64_t{kv_heads} * (head_dim + values()); }
  /// Of gradients of keys and values by query head.
  [[gnu::always_inline]] constexpr int64_t by_head_width() const { return int64_t{heads} * (head_dim + values()); }
};

/// F. Shapes: q[sequences,queries,heads*head_dim], kv[sequences,keys,kv_heads*(head_dim+values())] (by kv head a key, a value) ->
/// o[sequences,queries,heads*values()], lse[sequences,heads,queries]. With `carry` o and lse hold the result of the blocks so far, and are merged with this one.
/// With `sums`[sequences,heads,queries,2] instead of lse: m and l of the block, and o is not divided by l. A query that sees no key has
/// o = 0 and lse = m = -inf, l = 0. Flops: 2 (head_dim + values()) for each head and pair that is seen.
struct AttentionBlockForward {
  AttentionBlockShape shape;
  const float* q = nullptr;
  const float* kv = nullptr;
  float* o = nullptr;
  float* lse = nullptr;
  float* sums = nullptr;
  bool carry = false;
  void* scratch = nullptr;  ///< attention_scratch_bytes(...) bytes, aligned to 64
};

/// I. Shapes: dout, o, lse: of all blocks together; q, kv -> dq (like q), dkv (like kv; with `by_head`
/// [sequences,keys,heads*(head_dim+values())]: of each query head, canonical only). With `carry`, `carry_kv` added to what is there.
struct AttentionBlockInput {
  AttentionBlockShape shape;
  const float* dout = nullptr;
  const float* o = nullptr;
  const float* lse = nullptr;
  const float* q = nullptr;
  const float* kv = nullptr;
  float* dq = nullptr;
  float* dkv = nullptr;
  bool carry = false, carry_kv = false, by_head = false;
  void* scratch = nullptr;  ///< attention_scratch_bytes(...) bytes, aligned to 64
};

/// Parts that a merge combines, at most.
inline constexpr int kMostParts = 16;

/// Partial blocks, in the order of their keys, -> o[sequences,queries,heads*value_dim], lse[sequences,heads,queries]. o may be one of
/// the parts.
struct AttentionMergeForward {
  int64_t sequences = 1, queries = 0;
  int heads = 0, value_dim = 0;
  int parts = 0;
  std::array<const float*, kMostParts> part_o{};
  std::array<const float*, kMostParts> part_sums{};
  float* o = nullptr;
  float* lse = nullptr;
};

/// y[rows,kv_heads,width] = tree over the query heads of a group of tree over the parts of x[rows,heads,width]. y may be one of the
/// parts where heads = kv_heads.
struct AttentionMergeInput {
  int64_t rows = 0;
  int heads = 0, kv_heads = 0;
  int64_t width = 0;
  int parts = 0;
  std::array<const float*, kMostParts> part{};
  float* y = nullptr;
};

/// Scratch in bytes: about 4 tokens (2 head_dim + 4) forward, 4 tokens (6 head_dim + 8) backward; canonical: for dk and dv a sum at each
/// level of the tree.
int64_t attention_scratch_bytes(const AttentionForward& a);
int64_t attention_scratch_bytes(const AttentionInput& a);
int64_t attention_scratch_bytes(const AttentionBlockForward& a);
int64_t attention_scratch_bytes(const AttentionBlockInput& a);

}  // namespace shardlab::kernels
