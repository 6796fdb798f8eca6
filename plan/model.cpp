#include "plan/model.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace shardlab {

namespace {

using Kind = ModelParameter::Kind;

/// Appends parameters in order; `prefix` and `layer` belong to the layer being written.
class ParameterList {
 public:
  explicit ParameterList(const Model& model) : model_(model) {}

  void embeddings() {
    add("embed.tokens", {model_.vocab_rows(), model_.hidden}, Kind::kEmbedding);
    if (!model_.is_llama()) add("embed.positions", {model_.max_positions, model_.hidden}, Kind::kPositions);
  }

  void layer(int64_t index) {
    prefix_ = fmt::format("layers.{}.", index);
    layer_ = index;
    norm("attn.norm");
    if (model_.is_latent())
      latent_projections();
    else
      projection("attn.wqkv", "attn.bqkv", model_.qkv_rows(), model_.hidden, false, model_.has_qkv_biases());
    if (model_.qk_norm)
      for (const char* name : {"attn.q_norm.gamma", "attn.k_norm.gamma"}) add(name, {model_.head_dim}, Kind::kNormWeight);
    projection("attn.wo", "attn.bo", model_.hidden, model_.attention_rows(), true, !model_.is_llama());
    norm("mlp.norm");
    if (model_.is_mixture(index)) {
      const Experts& e = model_.experts;
      add("moe.router", {e.count, model_.hidden}, Kind::kMatrix);
      add("moe.wup", {e.count, 2 * e.ffn, model_.hidden}, Kind::kMatrix);
      add("moe.wdown", {e.count, model_.hidden, e.ffn}, Kind::kMatrix, true);
      if (e.shared > 0) {
        add("moe.shared.wup", {2 * e.shared * e.ffn, model_.hidden}, Kind::kMatrix);
        add("moe.shared.wdown", {model_.hidden, e.shared * e.ffn}, Kind::kMatrix, true);
        if (e.shared_gate) add("moe.shared.gate", {1, model_.hidden}, Kind::kMatrix);
      }
      return end_layer();
    }
    projection("mlp.wup", "mlp.bup", model_.up_rows(), model_.hidden, false, !model_.is_llama());
    projection("mlp.wdown", "mlp.bdown", model_.hidden, model_.ffn, true, !model_.is_llama());
    end_layer();
  }

  void head() {
    norm("final.norm");
    if (!model_.tied_embeddings) add("head.weight", {model_.vocab_rows(), model_.hidden}, Kind::kMatrix);
  }

  std::vector<ModelParameter> take() { return std::move(list_); }

 private:
  void end_layer() {
    prefix_.clear();
    layer_ = -1;
  }

  void add(std::string_view name, std::vector<int64_t> shape, Kind kind, bool residual = false) {
    list_.push_back({prefix_ + std::string(name), std::move(shape), layer_, kind, residual});
  }

  /// What makes q, k and v of latent attention: "a" narrows, "b" makes the heads of it.
  void latent_projections() {
    const LatentAttention& l = model_.latent;
    const int64_t query = model_.heads * model_.head_dim;
    if (l.q_rank > 0) {
      add("attn.wq_a", {l.q_rank, model_.hidden}, Kind::kMatrix);
      add("attn.q_a.norm.gamma", {l.q_rank}, Kind::kNormWeight);
      add("attn.wq_b", {query, l.q_rank}, Kind::kMatrix);
    } else {
      add("attn.wq", {query, model_.hidden}, Kind::kMatrix);
    }
    add("attn.wkv_a", {l.kv_rank, model_.hidden}, Kind::kMatrix);
    add("attn.wk_rope", {l.rope, model_.hidden}, Kind::kMatrix);
    add("attn.kv_a.norm.gamma", {l.kv_rank}, Kind::kNormWeight);
    add("attn.wkv_b", {model_.heads * (l.nope + l.v), l.kv_rank}, Kind::kMatrix);
  }

  void norm(const std::string& name) {
    add(name + ".gamma", {model_.hidden}, Kind::kNormWeight);
    if (!model_.is_llama()) add(name + ".beta", {model_.hidden}, Kind::kBias);
  }

  void projection(std::string_view weight, std::string_view bias, int64_t rows, int64_t columns, bool residual, bool biased) {
    add(weight, {rows, columns}, Kind::kMatrix, residual);
    if (biased) add(bias, {rows}, Kind::kBias);
  }

  const Model& model_;
  std::string prefix_;
  int64_t layer_ = -1;
  std::vector<ModelParameter> list_;
};

int64_t elements_of(const std::vector<ModelParameter>& parameters) {
  int64_t total = 0;
  for (const ModelParameter& p : parameters) {
    int64_t elements = 1;
    for (const int64_t extent : p.shape) elements *= extent;
    total += elements;
  }
  return total;
}

/// Elements of the weights that a token is multiplied by: the layers' matrices, of experts those of its own, and the head, tied or not.
double matmul_parameters(const Model& m) {
  double attention = static_cast<double>(m.hidden) * static_cast<double>(m.qkv_rows() + m.attention_rows());
  if (const LatentAttention& l = m.latent; m.is_latent()) {
    const double query = static_cast<double>(m.heads) * static_cast<double>(m.head_dim), heads = static_cast<double>(m.heads);
    const double q_rank = static_cast<double>(l.q_rank), kv_rank = static_cast<double>(l.kv_rank);
    attention = static_cast<double>(m.hidden) * (kv_rank + static_cast<double>(l.rope + m.attention_rows())) +
                kv_rank * heads * static_cast<double>(l.nope + l.v) +
                (l.q_rank > 0 ? q_rank * (static_cast<double>(m.hidden) + query) : static_cast<double>(m.hidden) * query);
  }
  const Experts& e = m.experts;
  const double mixtures = static_cast<double>(m.mixture_layers()), dense = static_cast<double>(m.layers) - mixtures;
  const double rows = dense * static_cast<double>(m.up_rows() + m.ffn) +
                      mixtures * (static_cast<double>(e.count + (e.shared_gate ? 1 : 0)) +
                                  static_cast<double>(e.top_k + e.shared) * 3 * static_cast<double>(e.ffn));
  const double hidden = static_cast<double>(m.hidden);
  return static_cast<double>(m.layers) * attention + hidden * rows + static_cast<double>(m.vocab_rows()) * hidden;
}

constexpr int64_t kMostLayers = 16384;

/// Every size positive and below 2^31, so that products of two of them cannot overflow.
Result<void> check_sizes(const Model& m) {
  if (m.layers > kMostLayers)
    return refusal(fmt::format("model.layers={} is above the limit of {}", m.layers, kMostLayers),
                   fmt::format("set model.layers to {} or less", kMostLayers));
  const std::pair<const char*, int64_t> sizes[] = {
      {"layers", m.layers}, {"hidden", m.hidden},     {"heads", m.heads}, {"kv_heads", m.kv_heads},
      {"ffn", m.ffn},       {"head_dim", m.head_dim}, {"vocab", m.vocab}, {"vocab_multiple", m.vocab_multiple}};
  for (const auto& [key, value] : sizes) {
    if (value < 1)
      return refusal(fmt::format("model.{}={} is not positive", key, value), fmt::format("set model.{} to 1 or more", key));
    if (value >= int64_t{1} << 31)
      return refusal(fmt::format("model.{}={} is absurdly large", key, value), fmt::format("set model.{} below 2^31", key));
  }
  if (m.max_positions < 0 || m.max_positions >= int64_t{1} << 31)
    return refusal(fmt::format("model.max_positions={} is outside [0, 2^31)", m.max_positions), "use 0 where no limit is stated");
  if (m.family == Family::kGpt && m.max_positions == 0)
    return refusal("model.max_positions=0: the gpt family has a learned table of positions",
                   "set model.max_positions to seq_len or more");
  return {};
}

/// Latent attention has all its widths, and heads that they make.
Result<void> check_latent(const Model& m) {
  const LatentAttention& l = m.latent;
  if (l == LatentAttention{}) return {};
  if (!m.is_llama())
    return refusal(
        fmt::format("model.kv_lora_rank={} in the gpt family: latent attention rotates a part of each head and has no biases",
                    l.kv_rank),
        "use model.family: llama, or model.kv_lora_rank: 0");
  const std::pair<const char*, int64_t> widths[] = {
      {"kv_lora_rank", l.kv_rank}, {"qk_nope_head_dim", l.nope}, {"qk_rope_head_dim", l.rope}, {"v_head_dim", l.v}};
  for (const auto& [key, value] : widths)
    if (value < 1 || value >= int64_t{1} << 31)
      return refusal(
          fmt::format("model.{}={}: latent attention has kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim and v_head_dim", key,
                      value),
          fmt::format("set model.{} from 1 to 2^31 - 1, or all of them to 0", key));
  if (l.q_rank < 0 || l.q_rank >= int64_t{1} << 31)
    return refusal(fmt::format("model.q_lora_rank={} is outside [0, 2^31)", l.q_rank), "use 0 for a q that is not compressed");
  if (l.rope % 2 != 0)
    return refusal(fmt::format("model.qk_rope_head_dim={} is odd: rotary embeddings turn pairs of elements", l.rope),
                   "use an even model.qk_rope_head_dim");
  if (m.head_dim != l.nope + l.rope)
    return refusal(fmt::format("model.head_dim={} with qk_nope_head_dim {} and qk_rope_head_dim {}: a head of q and k is both",
                               m.head_dim, l.nope, l.rope),
                   fmt::format("set model.head_dim: {}, or leave it out", l.nope + l.rope));
  if (m.kv_heads != m.heads)
    return refusal(fmt::format("model.kv_heads={} of model.heads={} with latent attention: every head has a key and a value",
                               m.kv_heads, m.heads),
                   fmt::format("set model.kv_heads: {}, or leave it out", m.heads));
  if (m.qk_norm || m.qkv_biases)
    return refusal(
        fmt::format("model.{}=true with model.kv_lora_rank={}: latent attention norms what it compresses, and has no biases",
                    m.qk_norm ? "qk_norm" : "qkv_biases", l.kv_rank),
        "leave model.qk_norm and model.qkv_biases out");
  return {};
}

/// A window has tokens and layers that it is of.
Result<void> check_window(const Model& m) {
  const SlidingWindow& w = m.window;
  if (w == SlidingWindow{}) return {};
  if (w.tokens < 1 || w.tokens >= int64_t{1} << 31)
    return refusal(fmt::format("model.window={}: a query sees from 1 to 2^31 - 1 keys in a local layer", w.tokens),
                   "set model.window, or leave model.global_layers, model.global_every and model.local_rope_theta out");
  if (w.global_layers < 0 || w.global_every < 0 || m.local_layers() < 1)
    return refusal(
        fmt::format("model.global_layers={} model.global_every={} of model.layers={}: no layer has the window of {} tokens",
                    w.global_layers, w.global_every, m.layers, w.tokens),
        "leave a layer for it, or set model.window: 0");
  if (!(w.rope_theta >= 0))
    return refusal(fmt::format("model.local_rope_theta={} is negative", w.rope_theta), "use 10000, or 0 for model.rope_theta");
  if (w.rope_theta > 0 && !m.is_llama())
    return refusal(fmt::format("model.local_rope_theta={} in the gpt family, which learns its positions", w.rope_theta),
                   "leave model.local_rope_theta out");
  return {};
}

Result<void> check_experts(const Model& m) {
  const Experts& e = m.experts;
  if (e == Experts{}) return {};
  if (!m.is_llama())
    return refusal(fmt::format("model.experts={} in the gpt family: experts are gated by SwiGLU and have no biases", e.count),
                   "use model.family: llama, or model.experts: 0");
  constexpr int64_t kMostExperts = 65536;
  if (e.count < 1 || e.count > kMostExperts)
    return refusal(fmt::format("model.experts={}", e.count), fmt::format("use 1 to {}, or 0 for a dense model", kMostExperts));
  if (e.top_k < 1 || e.top_k > e.count)
    return refusal(fmt::format("model.top_k={} of model.experts={}", e.top_k, e.count), "a token passes from 1 to all experts");
  if (e.ffn < 1 || e.ffn >= int64_t{1} << 31)
    return refusal(fmt::format("model.moe_ffn={} is outside [1, 2^31)", e.ffn), "set the inner width of an expert");
  if (!(e.factor > 0)) return refusal(fmt::format("model.router_factor={} is not positive", e.factor), "use 1");
  if (e.shared < 0 || e.shared > kMostExperts)
    return refusal(fmt::format("model.shared_experts={}", e.shared), fmt::format("use 0 to {}", kMostExperts));
  if (e.shared_gate && e.shared == 0)
    return refusal("model.shared_gate=true without shared experts: there is nothing to gate",
                   "set model.shared_experts, or model.shared_gate: false");
  if (e.dense_layers < 0 || e.every < 1 || m.mixture_layers() < 1)
    return refusal(fmt::format("model.dense_layers={} model.moe_every={} of model.layers={}: no layer has experts", e.dense_layers,
                               e.every, m.layers),
                   "leave a layer for them, or set model.experts: 0");
  if (e.groups < 1 || e.count % e.groups != 0 || e.groups_chosen < 1 || e.groups_chosen > e.groups)
    return refusal(
        fmt::format("model.router_groups={} model.router_groups_chosen={} of model.experts={}", e.groups, e.groups_chosen, e.count),
        "groups divide the experts, and a token chooses from 1 to all of them");
  if (e.top_k > e.groups_chosen * (e.count / e.groups))
    return refusal(fmt::format("model.top_k={}: {} groups of {} experts have fewer", e.top_k, e.groups_chosen, e.count / e.groups),
                   "raise model.router_groups_chosen, or lower model.top_k");
  if (!(e.balance >= 0) || !(e.z_loss >= 0))
    return refusal(fmt::format("model.balance_loss={} model.z_loss={}", e.balance, e.z_loss),
                   "use 0 for none, or a coefficient above it");
  if (!(e.bias_update_rate >= 0) || e.bias_update_rate > 1)
    return refusal(fmt::format("model.bias_update_rate={} is outside [0, 1]", e.bias_update_rate), "use 0 for no biases, or 0.001");
  if (!(e.capacity_factor >= 0) || e.capacity_factor > static_cast<float>(kMostExperts))
    return refusal(fmt::format("model.capacity_factor={}", e.capacity_factor),
                   "use 1 for the even share, 1.25 for a quarter more, or 0: experts take every row, and none is dropped");
  return {};
}

}  // namespace

std::vector<ModelParameter> parameters_of(const Model& model) {
  ParameterList list(model);
  list.embeddings();
  for (int64_t i = 0; i < model.layers; ++i) list.layer(i);
  list.head();
  return list.take();
}

int64_t parameter_count(const Model& model) {
  // Layers of a kind are alike: count the ends once, and one layer of each kind.
  ParameterList ends(model);
  ends.embeddings();
  ends.head();
  int64_t total = elements_of(ends.take());
  const int64_t mixtures = model.mixture_layers();
  for (const auto& [mixture, layers] : {std::pair{true, mixtures}, {false, model.layers - mixtures}}) {
    if (layers <= 0) continue;
    int64_t index = 0;
    while (model.is_mixture(index) != mixture) ++index;
    ParameterList layer(model);
    layer.layer(index);
    total += layers * elements_of(layer.take());
  }
  return total;
}

int64_t Experts::capacity(int64_t tokens) const {
  if (!drops()) return tokens;
  constexpr double kRounding = 1e-6;
  const double share = static_cast<double>(capacity_factor) * static_cast<double>(top_k) * static_cast<double>(tokens) /
                       static_cast<double>(std::max<int64_t>(1, count));
  const double rows = std::ceil(share * (1 - kRounding));
  return rows >= static_cast<double>(tokens) ? tokens : std::max<int64_t>(1, static_cast<int64_t>(rows));
}

int64_t Experts::most_rows(int64_t tokens, int64_t experts, int64_t parts) const {
  if (!drops()) return tokens / parts * top_k;
  return std::min(tokens / parts * std::min(top_k, experts), experts * capacity(tokens));
}

int64_t Model::mixture_layers() const {
  if (!is_mixture()) return 0;
  return std::max<int64_t>(0, layers / experts.every - std::min(layers, experts.dense_layers) / experts.every);
}

int64_t Model::local_layers() const {
  if (!has_windows()) return 0;
  const int64_t behind = std::max<int64_t>(0, layers - window.global_layers);
  return window.global_every == 0 ? behind : behind - behind / window.global_every;
}

double mean_keys(int64_t seq_len, int64_t window) {
  const auto s = static_cast<double>(seq_len), w = static_cast<double>(window);
  return window == 0 || window >= seq_len ? s / 2 : w - w * w / (2 * s);
}

double model_flops_per_token(const Model& model, double global, double local) {
  const double locals = static_cast<double>(model.local_layers());
  const double keys = (static_cast<double>(model.layers) - locals) * global + locals * local;
  return 6.0 * matmul_parameters(model) + 6.0 * static_cast<double>(model.heads * (model.head_dim + model.value_dim())) * keys;
}

double model_flops_per_token(const Model& model, int64_t seq_len) {
  return model_flops_per_token(model, mean_keys(seq_len, 0), mean_keys(seq_len, model.window.tokens));
}

Result<void> check(const Model& m) {
  SHARDLAB_TRY(check_sizes(m));
  SHARDLAB_TRY(check_experts(m));
  SHARDLAB_TRY(check_latent(m));
  SHARDLAB_TRY(check_window(m));
  if (m.heads % m.kv_heads != 0)
    return refusal(
        fmt::format("model.heads={} is not divisible by model.kv_heads={}: every KV head must serve the same number of query "
                    "heads",
                    m.heads, m.kv_heads),
        "correct one of the two");
  if (m.is_llama() && m.head_dim % 2 != 0)
    return refusal(fmt::format("model.head_dim={} is odd: rotary embeddings turn pairs of elements", m.head_dim),
                   "use an even model.head_dim");
  if (m.qk_norm && !m.is_llama())
    return refusal("model.qk_norm=true in the gpt family", "use model.family: llama, or model.qk_norm: false");
  if (m.qkv_biases && !m.is_llama())
    return refusal("model.qkv_biases=true in the gpt family, whose projections all have biases", "leave model.qkv_biases out");
  if (!(m.norm_epsilon > 0)) return refusal(fmt::format("model.norm_epsilon={} is not positive", m.norm_epsilon), "use 1e-5");
  if (m.is_llama() && !(m.rope_theta > 0))
    return refusal(fmt::format("model.rope_theta={} is not positive", m.rope_theta), "use 10000");
  if (!(m.init_deviation > 0)) return refusal(fmt::format("model.init_deviation={} is not positive", m.init_deviation), "use 0.02");
  if (matmul_parameters(m) > 1e16)
    return refusal(fmt::format("the model has about {:.3g} parameters", matmul_parameters(m)),
                   "at most 1e16 parameters are planned");
  return {};
}

}  // namespace shardlab
