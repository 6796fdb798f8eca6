// The operations of docs/canonical-order.md on ONE sequence, in plain scalar loops. Every tensor is row-major; s tokens, h hidden.
// T is float (bitwise comparisons) or double (bounds and finite differences).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "plan/base/philox.h"
#include "plan/base/token_order.h"

namespace shardlab::reference {

template <class T>
using Tensor = std::vector<T>;

/// y[s,out] = x[s,in] w[out,in]^T (+ bias[out]).
template <class T>
Tensor<T> linear(const Tensor<T>& x, const Tensor<T>& w, const Tensor<T>* bias, int64_t s, int64_t in, int64_t out);
/// dx[s,in] = dy[s,out] w.
template <class T>
Tensor<T> linear_input(const Tensor<T>& dy, const Tensor<T>& w, int64_t s, int64_t in, int64_t out);
/// dw[out,in] = dy^T x.
template <class T>
Tensor<T> linear_weight(const Tensor<T>& x, const Tensor<T>& dy, int64_t s, int64_t in, int64_t out);
/// dbias[n] of dy[s,n].
template <class T>
Tensor<T> bias_gradient(const Tensor<T>& dy, int64_t s, int64_t n);

/// y and, by token, the mean (0 for rms) and 1 / deviation.
template <class T>
struct Normed {
  Tensor<T> y, mean, inverse;
};
template <class T>
Normed<T> norm(const Tensor<T>& x, const Tensor<T>& gamma, const Tensor<T>* beta, float epsilon, int64_t s, int64_t h);
/// dx without the residual. `centred` is LayerNorm, else RMSNorm.
template <class T>
Tensor<T> norm_input(const Tensor<T>& dy, const Tensor<T>& x, const Tensor<T>& gamma, const Normed<T>& saved, bool centred,
                     int64_t s, int64_t h);
/// dgamma[h].
template <class T>
Tensor<T> norm_weight(const Tensor<T>& dy, const Tensor<T>& x, const Normed<T>& saved, int64_t s, int64_t h);

/// Heads of a projection: rows grouped by kv head, each group heads / kv_heads queries and one key of `dim` rows, one value of `of_value()`.
struct Heads {
  int64_t heads = 1, kv_heads = 1, dim = 1;
  int64_t values = 0;  ///< 0: dim
  int64_t per_group() const { return heads / kv_heads; }
  int64_t of_value() const { return values == 0 ? dim : values; }
  int64_t group() const { return (per_group() + 1) * dim + of_value(); }
  int64_t width() const { return kv_heads * group(); }
  int64_t query(int64_t head) const { return head / per_group() * group() + head % per_group() * dim; }
  int64_t key(int64_t kv_head) const { return kv_head * group() + per_group() * dim; }
  int64_t value(int64_t kv_head) const { return key(kv_head) + dim; }
};

/// Each head of q and of k of qkv[s, width] normed by itself (rms), values as they are.
template <class T>
Tensor<T> norm_heads(const Tensor<T>& qkv, const Heads& heads, const Tensor<T>& gamma_q, const Tensor<T>& gamma_k, float epsilon,
                     int64_t s);
template <class T>
struct HeadGradients {
  Tensor<T> dqkv, gamma_q, gamma_k;
};
template <class T>
HeadGradients<T> norm_heads_back(const Tensor<T>& dy, const Tensor<T>& qkv, const Heads& heads, const Tensor<T>& gamma_q,
                                 const Tensor<T>& gamma_k, float epsilon, int64_t s);

/// Which token of a text lies where in a sequence of s, to which of several documents each belongs, and how far a query sees.
struct Text {
  TokenOrder order;
  std::vector<int64_t> document;  ///< number of the document, by place; empty: all tokens are of one
  std::vector<int64_t> within;    ///< position in the document, by place
  int64_t window = 0;             ///< positions of the text that a query sees, the last of them its own; 0: all up to its own

  Text(const TokenOrder& o = {}) : order(o) {}
  /// `positions` in documents, by position in the text: a document begins at each 0.
  Text(const TokenOrder& o, const std::vector<int64_t>& positions);

  int64_t position(int64_t place, int64_t s) const {
    return within.empty() ? order.position(place, s) : within[static_cast<size_t>(place)];
  }
  /// Whether query i attends to key j.
  bool sees(int64_t i, int64_t j, int64_t s) const {
    const bool together = document.empty() || document[static_cast<size_t>(i)] == document[static_cast<size_t>(j)];
    const int64_t back = order.position(i, s) - order.position(j, s);
    return together && back >= 0 && (window == 0 || back < window);
  }
};

/// Rotates the queries and keys of qkv[s, width] in place; `sign` -1 rotates back.
template <class T>
void rope(Tensor<T>& qkv, const Heads& heads, float theta, int sign, int64_t s, const Text& text = {});

template <class T>
struct Attended {
  Tensor<T> o;    ///< [s, heads * of_value()]
  Tensor<T> lse;  ///< [heads, s]
};
template <class T>
Attended<T> attention(const Tensor<T>& qkv, const Heads& heads, int64_t s, const Text& text = {});
template <class T>
Tensor<T> attention_input(const Tensor<T>& dout, const Attended<T>& saved, const Tensor<T>& qkv, const Heads& heads, int64_t s,
                          const Text& text = {});
/// dtable[vocab,h] of dx[s,h].
template <class T>
Tensor<T> embedding_weight(const int32_t* ids, const Tensor<T>& dx, int64_t s, int64_t h, int64_t vocab);

/// gelu: u[n] -> a[n]. swiglu: u[2n] of alternating gate and up -> a[n].
template <class T>
Tensor<T> activation(const Tensor<T>& u, bool swiglu);
template <class T>
Tensor<T> activation_input(const Tensor<T>& da, const Tensor<T>& u, bool swiglu);

/// Scales what is kept, zeroes the rest, in place. Element i of z is the logical element first + i of the key.
template <class T>
void dropout(Tensor<T>& z, float p, const RandomKey& key, uint64_t first);

template <class T>
struct Entropy {
  T nll = 0;          ///< of the sequence, summed over its tokens
  Tensor<T> dlogits;  ///< divided by `tokens`
};
/// The columns from `words` on are padding: no maximum or sum sees them, and their gradient is 0.
template <class T>
Entropy<T> cross_entropy(const Tensor<T>& logits, const int32_t* targets, int64_t tokens, int64_t s, int64_t vocab, int64_t words);

/// w -= lr * (g + decay * w).
template <class T>
void sgd(Tensor<T>& w, const Tensor<T>& g, float lr, float decay);

struct AdamWRecipe {
  float lr = 1e-3f, beta1 = 0.9f, beta2 = 0.95f, epsilon = 1e-8f, decay = 0;
};
/// Step number `step`, from 0: moments m and v, bias-corrected; decoupled weight decay.
template <class T>
void adamw(Tensor<T>& w, Tensor<T>& m, Tensor<T>& v, const Tensor<T>& g, int64_t step, const AdamWRecipe& recipe);

struct LionRecipe {
  float lr = 0, beta1 = 0.9f, beta2 = 0.99f, decay = 0;
};
template <class T>
void lion(Tensor<T>& w, Tensor<T>& m, const Tensor<T>& g, const LionRecipe& recipe);

/// The 256 numbers that 8 bits of a moment stand for, in ascending order, as docs/canonical-order.md gives them.
std::vector<float> moment_numbers(bool has_sign);
/// What a block of moments is after it was stored in 8 bits: each element the number of its code times the block's largest size.
template <class T>
std::vector<T> stored_in_8_bits(const std::vector<T>& block, bool has_sign);

}  // namespace shardlab::reference
