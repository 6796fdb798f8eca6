// A mixture of experts on ONE sequence, as docs/canonical-order.md says it, token by token: no rows, no permutation, no counts but those
// of the loss for even use.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/base/token_order.h"
#include "plan/model.h"
#include "tests/numerics/reference/ops.h"

namespace shardlab::reference {

/// What one layer's experts made of one sequence of s tokens.
template <class T>
struct Mixed {
  Tensor<T> logits;                          ///< [s, count]
  std::vector<std::vector<int64_t>> chosen;  ///< by token, ascending
  std::vector<std::vector<bool>> taken;      ///< by token and choice: the expert had room
  Tensor<T> weights;                         ///< [s, top_k]
  std::vector<Tensor<T>> u, a, out;          ///< by token and choice: [2 ffn], [ffn], [h]
  Tensor<T> z;                               ///< [s, h]
};

/// Weights: router [count, h], up [count, 2 ffn, h], down [count, h, ffn].
template <class T>
struct ExpertWeights {
  const Tensor<T>& router;
  const Tensor<T>& up;
  const Tensor<T>& down;
};

template <class T>
struct ExpertGradients {
  Tensor<T> dx, routed;  ///< [s, h], by the experts and by their weights: the gradient of x is the sum of both
  Tensor<T> router, up, down;
};

/// `bias`: [count], added to scores for the choice; null: none. `order`: how the tokens of the text lie in the sequence.
template <class T>
Mixed<T> mix(const Tensor<T>& x, const ExpertWeights<T>& w, const Tensor<T>* bias, const Experts& e, int64_t s, int64_t h,
             const TokenOrder& order);

/// Gradients for dz[s, h], those of the two losses of the router included; the step has `tokens` tokens.
template <class T>
ExpertGradients<T> mix_back(const Tensor<T>& dz, const Tensor<T>& x, const Mixed<T>& saved, const ExpertWeights<T>& w,
                            const Experts& e, int64_t s, int64_t h, int64_t tokens);

/// Of each token's number its sigmoid.
template <class T>
Tensor<T> sigmoids(const Tensor<T>& logits);

/// x[s, h], each token times its factor p[s].
template <class T>
Tensor<T> gated(const Tensor<T>& x, const Tensor<T>& p);

/// The gradient of the logits whose sigmoids p[s] have multiplied x[s, h], for dz[s, h].
template <class T>
Tensor<T> gate_back(const Tensor<T>& dz, const Tensor<T>& x, const Tensor<T>& p);

/// Moves each bias by `rate` against what `load`, the tokens of a step by expert, is above the mean.
template <class T>
void follow_load(Tensor<T>& bias, const std::vector<int64_t>& load, T rate);

/// What the two losses of the router are of this sequence, as parts of means over the step's tokens.
template <class T>
T router_losses(const Mixed<T>& saved, const Experts& e, int64_t s, int64_t tokens);

}  // namespace shardlab::reference
