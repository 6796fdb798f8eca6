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
    projection("attn.wqkv", "attn.bqkv", model_.qkv_rows(), model_.hidden, false, model_.has_qkv_biases());
    if (model_.qk_norm)
      for (const char* name : {"attn.q_norm.gamma", "attn.k_norm.gamma"}) add(name, {model_.head_dim}, Kind::kNormWeight);
    projection("attn.wo", "attn.bo", model_.hidden, model_.heads * model_.head_dim, true, !model_.is_llama());
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
  const double attention = static_cast<double>(m.hidden) * static_cast<double>(m.qkv_rows() + m.heads * m.head_dim);
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

int64_t Experts::most_rows(int64_t tokens, int64_t experts) const {
  if (!drops()) return tokens * top_k;
  return std::min(tokens * std::min(top_k, experts), experts * capacity(tokens));
}

int64_t Model::mixture_layers() const {
  if (!is_mixture()) return 0;
  return std::max<int64_t>(0, layers / experts.every - std::min(layers, experts.dense_layers) / experts.every);
}

double model_flops_per_token(const Model& model, int64_t seq_len) {
  const double attention =
      static_cast<double>(model.layers) * static_cast<double>(model.heads * model.head_dim) * static_cast<double>(seq_len);
  return 6.0 * matmul_parameters(model) + 6.0 * attention;
}

Result<void> check(const Model& m) {
  SHARDLAB_TRY(check_sizes(m));
  SHARDLAB_TRY(check_experts(m));
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
