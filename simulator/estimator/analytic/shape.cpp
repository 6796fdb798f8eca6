#include "simulator/estimator/analytic/shape.h"

#include <fmt/format.h>

#include <array>
#include <string_view>
#include <utility>

namespace shardlab::simulator::analytic {
namespace {

int64_t mlp_matrices(const ModelShape& s) { return s.swiglu ? 3 : 2; }
int64_t norm_width(const ModelShape& s) { return s.rms_norm ? 1 : 2; }

/// Parameters of one expert.
int64_t expert_parameters(const ModelShape& s) {
  const int64_t biases = s.expert_biases ? (mlp_matrices(s) - 1) * s.moe_ffn + s.hidden : 0;
  return mlp_matrices(s) * s.hidden * s.moe_ffn + biases;
}

LayerParameters norm_parameters(const ModelShape& s) { return {.replicated = (s.post_norms ? 4 : 2) * norm_width(s) * s.hidden}; }

LayerParameters attention_parameters(const ModelShape& s) {
  LayerParameters p;
  if (s.latent()) {
    const int64_t query = s.heads * s.qk_dim();
    p.matrix =
        (s.q_rank > 0 ? s.q_rank : s.hidden) * query + s.kv_rank * s.heads * (s.head_dim + s.v_dim) + s.heads * s.v_dim * s.hidden;
    p.replicated += s.hidden * (s.kv_rank + s.rope_dim) + s.kv_rank;
    if (s.q_rank > 0) p.replicated += s.hidden * s.q_rank + s.q_rank;
    return p;
  }
  const int64_t rows = (s.heads + 2 * s.kv_heads) * s.head_dim;
  p.matrix = rows * s.hidden + s.heads * s.head_dim * s.hidden + (s.biases || s.qkv_biases ? rows : 0);
  p.matrix += (s.qk_norm_whole ? (s.heads + s.kv_heads) * s.head_dim : 0) + (s.sinks ? s.heads : 0);
  p.replicated += (s.biases || s.out_bias ? s.hidden : 0) + (s.qk_norm ? 2 * s.head_dim : 0);
  return p;
}

LayerParameters feed_forward_parameters(const ModelShape& s) {
  return {.matrix = mlp_matrices(s) * s.hidden * s.ffn + (s.biases ? (s.swiglu ? 2 : 1) * s.ffn : 0),
          .replicated = s.biases ? s.hidden : 0};
}

LayerParameters router_parameters(const ModelShape& s) {
  return {.replicated = s.hidden * (s.experts + (s.shared_gate ? 1 : 0)) + (s.router_bias ? s.experts : 0) +
                        (s.expert_biases ? s.experts : 0)};
}

/// Routed and shared experts.
LayerParameters experts_parameters(const ModelShape& s) {
  return {.matrix = mlp_matrices(s) * s.hidden * s.shared_experts * s.moe_ffn, .expert = s.experts * expert_parameters(s)};
}

/// Calls `use` with each module of a layer and its parameters.
template <class Use>
void for_each_module(const ModelShape& s, bool moe, const Use& use) {
  use(Trained::kNorms, norm_parameters(s));
  use(Trained::kAttention, attention_parameters(s));
  if (!moe) return use(Trained::kFeedForward, feed_forward_parameters(s));
  use(Trained::kRouter, router_parameters(s));
  use(Trained::kExperts, experts_parameters(s));
}

LayerParameters layer_parameters(const ModelShape& s, bool moe, uint8_t modules) {
  LayerParameters all;
  for_each_module(s, moe, [&](Trained::Module m, const LayerParameters& p) {
    if (modules & m) all += p;
  });
  return all;
}

/// Elements of the adapters of one layer, of `experts` routed experts: r rows and columns beside each projection of `in` by `out`.
int64_t adapters_of(const ModelShape& s, bool moe, int64_t experts) {
  const Trained& t = s.trained;
  const int64_t q = s.heads * s.qk_dim(), kv = s.kv_heads * s.head_dim, o = s.heads * s.value_dim();
  int64_t sum = 0;
  const auto add = [&](Trained::Projection p, int64_t in, int64_t out, int64_t times = 1) {
    if (t.adapts(p)) sum += times * t.rank * (in + out);
  };
  add(Trained::kQ, s.hidden, q), add(Trained::kK, s.hidden, kv), add(Trained::kV, s.hidden, kv), add(Trained::kO, o, s.hidden);
  const auto feed_forward = [&](int64_t width, int64_t times) {
    if (s.swiglu) add(Trained::kGate, s.hidden, width, times);
    add(Trained::kUp, s.hidden, width, times), add(Trained::kDown, width, s.hidden, times);
  };
  if (!moe) feed_forward(s.ffn, 1);
  if (moe) feed_forward(s.moe_ffn, experts);
  if (moe && s.shared_experts > 0) feed_forward(s.shared_experts * s.moe_ffn, 1);
  return sum;
}

}  // namespace

ModelShape shape_of(const Model& m) {
  const bool llama = m.is_llama();
  return {.layers = m.layers,
          .hidden = m.hidden,
          .heads = m.heads,
          .kv_heads = m.kv_heads,
          .head_dim = m.is_latent() ? m.latent.nope : m.head_dim,
          .ffn = m.ffn,
          .vocab = m.vocab_rows(),
          .max_positions = llama ? 0 : m.max_positions,
          .tied_embeddings = m.tied_embeddings,
          .swiglu = llama,
          .rms_norm = llama,
          .biases = !llama,
          .qk_norm = m.qk_norm,
          .qkv_biases = m.qkv_biases,
          .window = m.window.tokens,
          .windowed_layers = m.local_layers(),
          .experts = m.experts.count,
          .top_k = m.experts.top_k,
          .moe_ffn = m.experts.ffn,
          .shared_experts = m.experts.shared,
          .dense_layers = m.is_mixture() ? m.layers - m.mixture_layers() : 0,
          .router_groups = m.experts.groups,
          .router_groups_chosen = m.experts.groups_chosen,
          .capacity_factor = m.experts.capacity_factor,
          .shared_gate = m.experts.shared_gate,
          .q_rank = m.latent.q_rank,
          .kv_rank = m.latent.kv_rank,
          .rope_dim = m.latent.rope,
          .v_dim = m.latent.v};
}

Result<void> check(const ModelShape& s) {
  constexpr int64_t kLargest = int64_t{1} << 31;
  const std::array<std::pair<std::string_view, int64_t>, 6> needed{{{"layers", s.layers},
                                                                    {"hidden", s.hidden},
                                                                    {"heads", s.heads},
                                                                    {"kv_heads", s.kv_heads},
                                                                    {"head_dim", s.head_dim},
                                                                    {"vocab", s.vocab}}};
  for (const auto& [name, value] : needed)
    if (value < 1 || value >= kLargest)
      return Error{
          .message = fmt::format("model: {} is {}", name, value), .hint = "a whole number from 1 to 2^31 - 1", .where = {}};
  const std::array<std::pair<std::string_view, int64_t>, 13> possible{{{"ffn", s.ffn},
                                                                       {"window", s.window},
                                                                       {"windowed_layers", s.windowed_layers},
                                                                       {"max_positions", s.max_positions},
                                                                       {"experts", s.experts},
                                                                       {"top_k", s.top_k},
                                                                       {"moe_ffn", s.moe_ffn},
                                                                       {"shared_experts", s.shared_experts},
                                                                       {"dense_layers", s.dense_layers},
                                                                       {"q_rank", s.q_rank},
                                                                       {"kv_rank", s.kv_rank},
                                                                       {"rope_dim", s.rope_dim},
                                                                       {"v_dim", s.v_dim}}};
  for (const auto& [name, value] : possible)
    if (value < 0 || value >= kLargest)
      return Error{
          .message = fmt::format("model: {} is {}", name, value), .hint = "a whole number from 0 to 2^31 - 1", .where = {}};
  if (s.windowed_layers > s.layers || (s.windowed_layers > 0 && s.window < 1))
    return Error{.message = fmt::format("model: a window of {} tokens in {} of {} layers", s.window, s.windowed_layers, s.layers),
                 .hint = "a window has a token, and is of some of the layers",
                 .where = {}};
  if (s.heads % s.kv_heads != 0)
    return Error{
        .message = fmt::format("model: {} heads are no multiple of {} kv heads", s.heads, s.kv_heads), .hint = {}, .where = {}};
  if (s.latent() && s.v_dim == 0)
    return Error{
        .message = "model: latent attention (kv_rank) without v_dim", .hint = "set v_dim, the width of v a head", .where = {}};
  if (s.moe() && (s.top_k < 1 || s.top_k > s.experts || s.moe_ffn < 1 || s.dense_layers > s.layers))
    return Error{.message = fmt::format("model: {} experts with top_k {}, moe_ffn {}, dense_layers {} of {}", s.experts, s.top_k,
                                        s.moe_ffn, s.dense_layers, s.layers),
                 .hint = "top_k is from 1 to experts, moe_ffn at least 1, dense_layers at most layers",
                 .where = {}};
  if (!(s.capacity_factor >= 0) || s.capacity_factor > 65536 || (!s.moe() && s.capacity_factor != 0))
    return Error{.message = fmt::format("model: capacity_factor {} of {} experts", s.capacity_factor, s.experts),
                 .hint = "use 1 for the even share, or 0: experts take every row",
                 .where = {}};
  if ((!s.moe() || s.dense_layers > 0) && s.ffn < 1)
    return Error{.message = "model: dense layers without ffn", .hint = "set ffn, the width of the feed-forward", .where = {}};
  const Trained& t = s.trained;
  if (t.rank < 0 || t.rank > (1 << 16) || (t.frozen_bits != 4 && t.frozen_bits != 8 && t.frozen_bits != 16))
    return Error{.message = fmt::format("model: adapters of rank {} beside weights of {} bits", t.rank, t.frozen_bits),
                 .hint = "a rank from 0 to 65536, and 4, 8 or 16 bits",
                 .where = {}};
  if (s.latent() && t.adapts(Trained::kQ | Trained::kK | Trained::kV | Trained::kO))
    return Error{.message = "model: adapters of latent attention are not told",
                 .hint = "adapt gate, up and down alone: lora_targets=mlp",
                 .where = {}};
  // In floating point, since the whole-number count may overflow.
  const double attention = 4.0 * static_cast<double>(s.hidden) * static_cast<double>(s.heads) * static_cast<double>(s.qk_dim());
  const double experts = 3.0 * static_cast<double>(s.experts + s.shared_experts) * static_cast<double>(s.moe_ffn);
  const double layer = attention + static_cast<double>(s.hidden) * (3.0 * static_cast<double>(s.ffn) + experts);
  const double all = static_cast<double>(s.layers) * layer + 2.0 * static_cast<double>(s.vocab) * static_cast<double>(s.hidden);
  if (all > 9e15)
    return Error{.message = fmt::format("model: {:.3g} parameters", all), .hint = "at most 9e15 are supported", .where = {}};
  return {};
}

LayerParameters dense_layer_parameters(const ModelShape& s) { return layer_parameters(s, false, Trained::kAll); }
LayerParameters moe_layer_parameters(const ModelShape& s) { return layer_parameters(s, true, Trained::kAll); }
LayerParameters frozen_layer_parameters(const ModelShape& s, bool moe) { return layer_parameters(s, moe, s.trained.frozen); }

int64_t parameter_count(const ModelShape& s) {
  const int64_t dense = s.layers - s.moe_layers();
  return dense * dense_layer_parameters(s).total() + s.moe_layers() * moe_layer_parameters(s).total() + norm_width(s) * s.hidden +
         (s.max_positions + (s.tied_embeddings ? 1 : 2) * s.vocab) * s.hidden;
}

int64_t adapter_count(const ModelShape& s) {
  return (s.layers - s.moe_layers()) * adapters_of(s, false, 0) + s.moe_layers() * adapters_of(s, true, s.experts);
}

int64_t trained_count(const ModelShape& s) {
  const int64_t dense = s.layers - s.moe_layers(), table = s.vocab * s.hidden;
  int64_t frozen = dense * frozen_layer_parameters(s, false).total() + s.moe_layers() * frozen_layer_parameters(s, true).total();
  if (s.trained.freezes(Trained::kEmbedding)) frozen += table + s.max_positions * s.hidden;
  if (s.trained.freezes(Trained::kHead)) frozen += norm_width(s) * s.hidden + (s.tied_embeddings ? 0 : table);
  return parameter_count(s) - frozen + adapter_count(s);
}

int64_t active_parameter_count(const ModelShape& s) {
  const int64_t idle = s.moe() ? (s.experts - s.top_k) * expert_parameters(s) : 0;
  return parameter_count(s) - s.moe_layers() * idle;
}

double model_flops_per_token(const ModelShape& s, int64_t seq_len) {
  const auto of = [](int64_t v) { return static_cast<double>(v); };
  // Tables are looked up, not multiplied; a tied one is multiplied by the head.
  const double tables = of(s.hidden) * of(s.max_positions + (s.tied_embeddings ? 0 : s.vocab));
  const double attention =
      3 * of(s.layers) * of(s.heads) * of(s.qk_dim() + s.value_dim()) * of(seq_len) * s.attention_share(seq_len);
  // A frozen weight has no gradient: a third of its products.
  const int64_t dense = s.layers - s.moe_layers();
  const LayerParameters frozen = frozen_layer_parameters(s, false), mixture = frozen_layer_parameters(s, true);
  double still = of(dense * frozen.total() + s.moe_layers() * (mixture.total() - mixture.expert));
  if (mixture.expert > 0) still += of(s.moe_layers()) * of(mixture.expert) * of(s.top_k) / of(s.experts);
  if (s.trained.freezes(Trained::kHead)) still += of(s.hidden) * of(s.vocab + norm_width(s));
  const int64_t adapters = dense * adapters_of(s, false, 0) + s.moe_layers() * adapters_of(s, true, s.top_k);
  return 6 * (of(active_parameter_count(s)) - tables + of(adapters)) - 2 * still + attention;
}

}  // namespace shardlab::simulator::analytic
