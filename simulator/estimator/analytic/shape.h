// The model as the analytic forms see it: sizes only, for every family that a framework profile can run.
#pragma once

#include <cstdint>

#include "plan/base/result.h"
#include "plan/model.h"

namespace shardlab::simulator::analytic {

/// Weights that a run trains. Frozen ones are read, forward and for gradients of what is before them, but have no gradients, master
/// copies and moments. Adapters of low rank beside frozen projections are trained in their place: y = x W + (x A) B, A of r columns and
/// B of r rows. Source: Hu et al. 2021 (LoRA), section 4.1.
struct Trained {
  enum Module : uint8_t {
    kEmbedding = 1,
    kHead = 2,
    kAttention = 4,
    kFeedForward = 8,  ///< of dense layers
    kExperts = 16,     ///< shared ones included
    kRouter = 32,
    kNorms = 64,
    kAll = 127
  };
  enum Projection : uint8_t { kQ = 1, kK = 2, kV = 4, kO = 8, kGate = 16, kUp = 32, kDown = 64 };

  uint8_t frozen = 0;        ///< modules
  uint8_t adapted = 0;       ///< projections with an adapter; of experts each expert's
  int64_t rank = 0;          ///< r of the adapters
  int32_t frozen_bits = 16;  ///< of a frozen projection; below 16 each product makes it whole first

  bool freezes(Module m) const { return (frozen & m) != 0; }
  bool adapts(int projections) const { return rank > 0 && (adapted & projections) != 0; }
  /// Bytes of a frozen weight of the layers' projections, with the scales of its blocks: 4 bits are NormalFloat with scales of 8 bits
  /// for 64 weights and of 32 for 256 scales, 0.127 bits a weight (Dettmers et al. 2023, QLoRA, section 3); 8 bits have a scale of
  /// 32 for 256.
  double frozen_bytes() const { return frozen_bits == 4 ? (4 + 0.127) / 8 : frozen_bits == 8 ? 1 + 4.0 / 256 : 2; }
  friend bool operator==(const Trained&, const Trained&) = default;
};

/// Sizes of a transformer. Zero where a part is absent. Filled from a `Model`, or by hand for what `Model` cannot say yet: mixture
/// of experts and multi-head latent attention.
struct ModelShape {
  int64_t layers = 0, hidden = 0, heads = 0, kv_heads = 0;
  int64_t head_dim = 0;  ///< of q and k; under latent attention without the rotary part
  int64_t ffn = 0;       ///< of the dense layers, each of gate and up under swiglu
  int64_t vocab = 0;
  int64_t max_positions = 0;  ///< rows of a learned position table; 0 for rotary positions
  bool tied_embeddings = false;
  bool swiglu = false;         ///< else gelu
  bool rms_norm = false;       ///< else LayerNorm with bias
  bool biases = false;         ///< of the projections
  bool qk_norm = false;        ///< a norm over each head of q and k
  bool qkv_biases = false;     ///< of q, k and v alone
  bool router_bias = false;    ///< a learned correction of each expert's score (DeepSeek-V3)
  bool out_bias = false;       ///< of attention's output projection (gpt-oss)
  bool expert_biases = false;  ///< of the router and of each expert's projections (gpt-oss)
  bool qk_norm_whole = false;  ///< a norm over all heads of q together, and one over those of k (OLMo 2)
  bool post_norms = false;     ///< a norm after attention and one after the feed-forward, beside those before (Gemma 2)
  bool sinks = false;          ///< a learned logit a head that takes attention from the tokens (gpt-oss)

  /// In `windowed_layers` layers a token sees `window` tokens, itself included; in the other layers all tokens before it.
  int64_t window = 0, windowed_layers = 0;

  // Mixture of experts. Layers from `dense_layers` on have `experts` of width `moe_ffn`, `top_k` of them for a token, and
  // `shared_experts` that every token passes.
  int64_t experts = 0, top_k = 0, moe_ffn = 0, shared_experts = 0, dense_layers = 0;
  int64_t router_groups = 1, router_groups_chosen = 1;  ///< a token's experts lie in so many of so many groups of neighbours
  double capacity_factor = 0;  ///< an expert takes so many times its even share of rows, and drops the others; 0: it takes all
  bool shared_gate = false;    ///< a vector gates what the shared experts make; counted with the router

  // Multi-head latent attention (DeepSeek-V2, section 2.1): ranks of the compressed q (0: not compressed) and kv, width of the
  // rotary part shared by the heads, width of v.
  int64_t q_rank = 0, kv_rank = 0, rope_dim = 0, v_dim = 0;

  Trained trained;  ///< all of it, unless said otherwise

  bool latent() const { return kv_rank > 0; }
  bool moe() const { return experts > 0; }
  int64_t moe_layers() const { return moe() ? layers - dense_layers : 0; }
  int64_t qk_dim() const { return latent() ? head_dim + rope_dim : head_dim; }
  /// Share of causal attention that is left within the windows, over all layers. Formula: a window w of s tokens has w s - w^2 / 2
  /// of s^2 / 2 pairs.
  double attention_share(int64_t seq_len) const {
    if (windowed_layers == 0 || seq_len <= window) return 1;
    const double w = static_cast<double>(window) / static_cast<double>(seq_len);
    const double windowed = static_cast<double>(windowed_layers) / static_cast<double>(layers);
    return 1 - windowed + windowed * (2 - w) * w;
  }
  int64_t value_dim() const { return latent() ? v_dim : head_dim; }
  friend bool operator==(const ModelShape&, const ModelShape&) = default;
};

ModelShape shape_of(const Model& model);

/// Refuses sizes that no transformer has, and sizes that overflow later computations (each is below 2^31, parameters below 2^53).
Result<void> check(const ModelShape& shape);

/// Parameters in elements, by how layouts cut them.
struct LayerParameters {
  int64_t matrix = 0;      ///< cut by tp
  int64_t replicated = 0;  ///< norms, biases of row-parallel projections, routers, latent down-projections: whole on each tp rank
  int64_t expert = 0;      ///< cut by ep and expert tp
  int64_t total() const { return matrix + replicated + expert; }
  LayerParameters& operator+=(const LayerParameters& o) {
    matrix += o.matrix, replicated += o.replicated, expert += o.expert;
    return *this;
  }
};
/// Of the model itself, without adapters.
LayerParameters dense_layer_parameters(const ModelShape& shape);
LayerParameters moe_layer_parameters(const ModelShape& shape);
/// The part of them that is frozen.
LayerParameters frozen_layer_parameters(const ModelShape& shape, bool moe);

/// All parameters of the model, without adapters. A tied head is none of its own.
int64_t parameter_count(const ModelShape& shape);
/// Of the adapters.
int64_t adapter_count(const ModelShape& shape);
/// Parameters that a run trains, adapters included.
int64_t trained_count(const ModelShape& shape);
/// Parameters that one token passes: the N of 6 N D.
int64_t active_parameter_count(const ModelShape& shape);

/// Training flops of one token without recompute: 6 a matmul parameter that the token passes, 4 if it is frozen, head included, and causal attention
/// 3 * s * heads * (qk_dim + value_dim) a layer, of which windows leave `attention_share`. Source: Narayanan et al. 2021, appendix,
/// with the causal half.
double model_flops_per_token(const ModelShape& shape, int64_t seq_len);

}  // namespace shardlab::simulator::analytic
