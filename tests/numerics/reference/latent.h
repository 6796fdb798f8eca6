// Latent attention's heads on ONE sequence, in plain scalar loops (docs/canonical-order.md, "LatentHeads"). T as in ops.h.
#pragma once

#include "plan/model.h"
#include "tests/numerics/reference/ops.h"

namespace shardlab::reference {

/// Operands, or their gradients: q[s, heads*(nope+rope)], kv[s, heads*(nope+v)] (by head a key's part, a value), k_rope[s, rope].
template <class T>
struct Latents {
  Tensor<T> q, kv, k_rope;
};

/// Rows of q, k and v by head, q and k rotated by angles of base `theta`: [s, heads*(2(nope+rope)+v)].
template <class T>
Tensor<T> latent_heads(const Latents<T>& x, const Model& model, float theta, int64_t s, const Text& text);
/// The gradients of what the rows are made of.
template <class T>
Latents<T> latent_heads_back(const Tensor<T>& dqkv, const Model& model, float theta, int64_t s, const Text& text);

}  // namespace shardlab::reference
