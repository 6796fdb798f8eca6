// Model shapes and exact parameter counts, for the GPT-2 and Llama families.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "plan/base/result.h"
#include "plan/base/units.h"

namespace shardlab {

/// gpt: LayerNorm, learned positions, GELU, biases. llama: RMSNorm, RoPE, SwiGLU, grouped-query attention, no biases but those of `qkv_biases`.
enum class Family : uint8_t { kGpt, kLlama };

/// A mixture of experts in the place of the feed-forward: a router chooses `top_k` of `count` experts for each token.
struct Experts {
  int64_t count = 0;      ///< 0: the feed-forward is one for all tokens
  int64_t top_k = 0;      ///< experts of a token
  int64_t ffn = 0;        ///< inner width of an expert
  bool sigmoid = false;   ///< scores are sigmoids of the logits; else their softmax
  bool normalise = true;  ///< the weights of a token's experts are their scores divided by the sum of these
  float factor = 1;       ///< times the weights
  float balance = 0;      ///< coefficient of the loss for even use of the experts, by sequence
  float z_loss = 0;       ///< coefficient of the loss for small logits
  /// Shared experts, which every token passes beside its own: one feed-forward of `shared` times the width of an expert.
  int64_t shared = 0;
  /// The output of the shared experts for a token is multiplied by the sigmoid of the token's product with a vector of weights (Qwen2-MoE).
  bool shared_gate = false;
  /// Which layers have experts: of those from `dense_layers` on, counted from 0, each whose number plus 1 is a multiple of `every`. The
  /// others have the feed-forward of a dense model.
  int64_t dense_layers = 0, every = 1;
  /// Experts are in `groups` groups of neighbours. A token's experts lie in its `groups_chosen` best groups: those with the largest score of an
  /// expert, or, with sigmoids, the largest sum of two scores (DeepSeek-V2, section 2.2.2; DeepSeek-V3, section 2.1.2).
  int64_t groups = 1, groups_chosen = 1;
  /// Added to or taken from the bias of an expert after each step; 0: no biases. Experts are chosen by score plus bias, and weighed by
  /// score (Wang et al. 2024; DeepSeek-V3, section 2.1.2).
  float bias_update_rate = 0;
  /// An expert takes so many times its even share of the rows of each sequence, and the rows beyond are dropped; 0: it takes all rows.
  float capacity_factor = 0;
  bool has_bias() const { return bias_update_rate != 0; }
  bool drops() const { return capacity_factor != 0; }
  /// Rows that an expert takes of a sequence of so many tokens: ceil(capacity_factor top_k tokens / count), and no more than there are
  /// tokens. A product that is within a millionth of a whole number is that number, since 1.1 has no exact float.
  /// Source: Lepikhin et al., "GShard" (2020), section 2.2, where a group of tokens is a sequence; Fedus et al. 2021, section 2.2.
  int64_t capacity(int64_t tokens) const;
  /// Rows that one of so many equal parts of a sequence of `tokens` tokens makes at most at `experts` of the experts. Without a capacity: top_k of every token.
  int64_t most_rows(int64_t tokens, int64_t experts, int64_t parts = 1) const;
  friend bool operator==(const Experts&, const Experts&) = default;
};

/// Multi-head latent attention: keys and values of all heads are made from one narrow vector a token (DeepSeek-V2, section 2.1; DeepSeek-V3,
/// section 2.1.1). A head of q and of k is `nope` elements without a position and then `rope` rotated ones, which of k all heads share.
struct LatentAttention {
  int64_t q_rank = 0;   ///< width of the compressed q; 0: q is made from the token itself
  int64_t kv_rank = 0;  ///< width of the compressed keys and values; 0: attention is not latent
  int64_t nope = 0;     ///< elements of a head of q and of k that are not rotated
  int64_t rope = 0;     ///< elements of a head of q and of k that are rotated
  int64_t v = 0;        ///< elements of a head of v
  /// Added to the mean square by the norms of the compressed vectors, whatever the model's other norms add.
  /// Source: transformers, models/deepseek_v2 and deepseek_v3, whose q_a_layernorm and kv_a_layernorm take no rms_norm_eps.
  static constexpr float kNormEpsilon = 1e-6f;
  friend bool operator==(const LatentAttention&, const LatentAttention&) = default;
};

/// Attention within a window in some layers, which are called local; the others are global. A query at position i of the text sees, in a
/// local layer, the keys at the positions j with i - tokens < j <= i: itself and `tokens` - 1 before it (Beltagy et al., "Longformer"
/// (2020), section 3.1; Jiang et al., "Mistral 7B" (2023), section 2; transformers, `sliding_window`).
struct SlidingWindow {
  int64_t tokens = 0;  ///< keys that a query sees at most in a local layer; 0: every layer is global
  /// Which layers are global: the first `global_layers` (Qwen2, `max_window_layers`), and of those behind them each `global_every`-th
  /// (Gemma 2: 2; Gemma 3: 6); 0: none of those.
  int64_t global_layers = 0, global_every = 0;
  float rope_theta = 0;  ///< base of the rotary embedding in local layers (Gemma 3); 0: the model's
  friend bool operator==(const SlidingWindow&, const SlidingWindow&) = default;
};

struct Model {
  std::string name;
  Family family = Family::kGpt;
  int64_t layers = 0;
  int64_t hidden = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;  ///< equal to heads for multi-head attention
  int64_t head_dim = 0;  ///< of q and k; of v too, but under latent attention
  int64_t ffn = 0;       ///< width of the feed-forward layer (of each of gate and up for llama)
  int64_t vocab = 0;
  int64_t vocab_multiple = 1;  ///< rows of the tables of tokens are padded to a multiple of this
  int64_t max_positions = 0;   ///< rows of the learned position table (gpt); the limit of seq_len where stated
  bool tied_embeddings = false;
  bool qkv_biases = false;  ///< of q, k and v (llama; those of gpt are always there)
  bool qk_norm = false;     ///< RMSNorm over each head of q, and of k, before they are rotated (llama)
  float norm_epsilon = 1e-5f;
  float rope_theta = 10000.0f;
  float init_deviation = 0.02f;
  LatentAttention latent;
  SlidingWindow window;
  Experts experts;
  friend bool operator==(const Model&, const Model&) = default;

  bool is_llama() const { return family == Family::kLlama; }
  bool has_qkv_biases() const { return !is_llama() || qkv_biases; }
  /// Whether some layers are mixtures of experts, and whether layer `layer` is.
  bool is_mixture() const { return experts.count > 0; }
  bool is_mixture(int64_t layer) const { return is_mixture() && layer >= experts.dense_layers && (layer + 1) % experts.every == 0; }
  int64_t mixture_layers() const;
  bool is_latent() const { return latent.kv_rank > 0; }
  /// Whether some layers attend within a window, and whether layer `layer` does.
  bool has_windows() const { return window.tokens > 0; }
  bool is_local(int64_t layer) const {
    return has_windows() && layer >= window.global_layers &&
           (window.global_every == 0 || (layer - window.global_layers + 1) % window.global_every != 0);
  }
  int64_t local_layers() const;
  /// Base of the rotary embedding in local layers.
  float local_rope_theta() const { return window.rope_theta > 0 ? window.rope_theta : rope_theta; }
  /// Elements of a head of v.
  int64_t value_dim() const { return is_latent() ? latent.v : head_dim; }
  /// Rows of q, k and v, grouped by kv head: what the fused projection makes and attention takes.
  int64_t qkv_rows() const { return heads * head_dim + kv_heads * (head_dim + value_dim()); }
  /// Rows of what attention makes of all heads.
  int64_t attention_rows() const { return heads * value_dim(); }
  /// Rows of the tables of tokens. Those beyond `vocab` are no words: their logits take no part in the loss, and they have no gradient.
  int64_t vocab_rows() const { return (vocab + vocab_multiple - 1) / vocab_multiple * vocab_multiple; }
  /// Output rows of the feed-forward's first projection: alternating gate and up rows for SwiGLU.
  int64_t up_rows() const { return is_llama() ? 2 * ffn : ffn; }
};

/// One logical parameter tensor as every layout and checkpoint names it.
struct ModelParameter {
  std::string name;            ///< "embed.tokens", "embed.positions", "layers.3.attn.wqkv", "final.norm.gamma", "head.weight"
  std::vector<int64_t> shape;  ///< logical
  int64_t layer = -1;          ///< or -1 for embeddings and head
  enum class Kind : uint8_t { kMatrix, kNormWeight, kBias, kEmbedding, kPositions } kind = Kind::kMatrix;
  bool residual_projection = false;  ///< starts with deviation / sqrt(2 layers), as GPT-2
};

/// Every parameter, in the fixed order that numbers them for random keys. A tied head is no parameter of its own.
std::vector<ModelParameter> parameters_of(const Model& model);

/// Sum of the elements of `parameters_of`.
int64_t parameter_count(const Model& model);

/// Keys that a query sees on average, its own key counted as half: s / 2 for s tokens, and w - w^2 / (2 s) within a window of w < s tokens.
double mean_keys(int64_t seq_len, int64_t window);

/// Training flops of one token, forward and backward, matmuls and causal attention, no recompute: what MFU counts.
/// Formula: 6 * (matmul parameters that the token is multiplied by, the head's included, embedding look-ups not) + 6 * heads * (head_dim +
/// value_dim) * keys, summed over the layers (QK^T and PV at 2 flops each way, times three). keys: `mean_keys` of the layer's window.
/// Source: Narayanan et al. 2021, appendix; PaLM, appendix B.
double model_flops_per_token(const Model& model, int64_t seq_len);
/// `model_flops_per_token` if a query sees `global` keys on average in global layers, and `local` keys in local layers.
double model_flops_per_token(const Model& model, double global, double local);

/// Refuses a shape that no transformer has (non-positive sizes, heads not divisible by kv_heads, odd head_dim under RoPE).
Result<void> check(const Model& model);

}  // namespace shardlab
