#include "tests/numerics/reference/trainer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "plan/base/check.h"
#include "tests/numerics/reference/functions.h"
#include "tests/numerics/reference/latent.h"
#include "tests/numerics/reference/order.h"

namespace shardlab::reference {
namespace {

template <class T>
Tensor<T> add(const Tensor<T>& a, const Tensor<T>& b) {
  Tensor<T> c(a.size());
  for (size_t i = 0; i < a.size(); ++i) c[i] = a[i] + b[i];
  return c;
}

/// x + (z + bias), rows of `h`.
template <class T>
Tensor<T> add_residual(const Tensor<T>& x, const Tensor<T>& z, const Tensor<T>* bias, size_t h) {
  Tensor<T> y(x.size());
  for (size_t i = 0; i < x.size(); ++i) y[i] = x[i] + (bias ? z[i] + (*bias)[i % h] : z[i]);
  return y;
}

template <class T>
Contribution<T> add_contributions(Contribution<T> a, const Contribution<T>& b) {
  a.nll = a.nll + b.nll;
  for (size_t i = 0; i < a.gradients.size(); ++i) a.gradients[i] = add(a.gradients[i], b.gradients[i]);
  for (size_t l = 0; l < a.load.size(); ++l)
    for (size_t e = 0; e < a.load[l].size(); ++e) a.load[l][e] += b.load[l][e];
  return a;
}

bool decays(ModelParameter::Kind kind) { return kind != ModelParameter::Kind::kNormWeight && kind != ModelParameter::Kind::kBias; }

bool is_gamma(const ModelParameter& p) { return p.name.ends_with("gamma"); }

}  // namespace

template <class T>
struct Trainer<T>::LayerState {
  Tensor<T> x;            // [s, h] input
  Normed<T> n1;           // [s, h]
  Tensor<T> raw;          // [s, qkv_rows], before the norms of heads; empty where there are none
  Tensor<T> q_a, kv_a;    // [s, rank], of latent attention, before their norms; q_a empty where q is not compressed
  Normed<T> nq, nkv;      // [s, rank]
  Tensor<T> qkv;          // [s, qkv_rows], rotated
  Attended<T> attention;  // [s, heads * dim]
  Tensor<T> x1;           // [s, h] after attention
  Normed<T> n2;           // [s, h]
  Tensor<T> u;            // [s, up_rows]
  Tensor<T> a;            // [s, ffn]
  Mixed<T> mixed;         // of a mixture of experts; u and a are then of the experts that every token passes
  Tensor<T> shared;       // [s, h], what these made
  Tensor<T> gate;         // [s], its factors; empty without a gate
  Tensor<T> y;            // [s, h] output
};

template <class T>
struct Trainer<T>::SequenceState {
  Text text;
  std::vector<LayerState> layers;
  Tensor<T> x;         // [s, h] the last layer's output
  Normed<T> n;         // [s, h]
  Entropy<T> entropy;  // dlogits [s, V]
};

template <class T>
Trainer<T>::Trainer(const Model& model, const Train& train, int64_t sequences, const TokenOrder& order, bool packed)
    : model_(model),
      train_(train),
      sequences_(sequences),
      order_(order),
      packed_(packed),
      heads_{model.heads, model.kv_heads, model.head_dim, model.is_latent() ? model.latent.v : 0},
      parameters_(parameters_of(model)) {
  if (model.experts.has_bias())
    router_biases_.assign(static_cast<size_t>(model.layers), Tensor<T>(static_cast<size_t>(model.experts.count), T(0)));
  for (const ModelParameter& p : parameters_) {
    const size_t number = values_.size();
    index_[p.name] = number;
    int64_t elements = 1;
    for (const int64_t extent : p.shape) elements *= extent;
    Tensor<T> value(static_cast<size_t>(elements), T(is_gamma(p) ? 1 : 0));
    if (decays(p.kind)) {
      const float deviation =
          p.residual_projection ? model.init_deviation / std::sqrt(2.0f * static_cast<float>(model.layers)) : model.init_deviation;
      const RandomKey key{train.seed, RandomUse::kInitialise, static_cast<uint32_t>(number), 0};
      for (size_t i = 0; i < value.size(); ++i) value[i] = T(initial_normal(key, i, deviation));
    }
    first_moment_.emplace_back(value.size(), T(0));
    second_moment_.emplace_back(value.size(), T(0));
    for (size_t i = 0; i < value.size(); ++i) {
      if (i % 2048 == 0) blocks_.emplace_back();
      blocks_.back().emplace_back(number, i);
    }
    values_.push_back(std::move(value));
  }
}

template <class T>
size_t Trainer<T>::index(const std::string& name) const {
  const auto found = index_.find(name);
  SHARDLAB_CHECK(found != index_.end(), "the model has no parameter `{}`", name);
  return found->second;
}

template <class T>
std::string Trainer<T>::in_layer(int64_t layer, const char* name) const {
  return fmt::format("layers.{}.{}", layer, name);
}

template <class T>
const Tensor<T>* Trainer<T>::bias(const std::string& name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &values_[found->second];
}

template <class T>
void Trainer<T>::drop(Tensor<T>& z, int64_t layer, int site, int64_t sequence) const {
  if (train_.dropout == 0) return;
  const RandomKey key{train_.seed, RandomUse::kDropout, static_cast<uint32_t>((layer + 1) * 4 + site),
                      static_cast<uint32_t>(step_)};
  dropout(z, train_.dropout, key, static_cast<uint64_t>(sequence * train_.seq_len * model_.hidden));
}

template <class T>
Normed<T> Trainer<T>::normed(const Tensor<T>& x, const std::string& name) const {
  const auto width = static_cast<int64_t>(value(name + ".gamma").size());
  const bool compressed = name.ends_with(".q_a.norm") || name.ends_with(".kv_a.norm");  // 1e-6, whatever the others add
  const float epsilon = compressed ? 1e-6f : model_.norm_epsilon;
  return norm(x, value(name + ".gamma"), bias(name + ".beta"), epsilon, train_.seq_len, width);
}

template <class T>
ExpertWeights<T> Trainer<T>::experts(int64_t layer) const {
  return {value(in_layer(layer, "moe.router")), value(in_layer(layer, "moe.wup")), value(in_layer(layer, "moe.wdown"))};
}

template <class T>
const Tensor<T>* Trainer<T>::router_bias(int64_t layer) const {
  return model_.experts.has_bias() ? &router_biases_[static_cast<size_t>(layer)] : nullptr;
}

/// Rows of q, k and v of latent attention, rotated.
template <class T>
void Trainer<T>::project_latents(LayerState& l, int64_t layer, const Text& text) const {
  const LatentAttention& a = model_.latent;
  const int64_t s = train_.seq_len, h = model_.hidden, query = model_.heads * model_.head_dim;
  const auto project = [&](const Tensor<T>& x, const char* w, int64_t in, int64_t out) {
    return linear<T>(x, value(in_layer(layer, w)), nullptr, s, in, out);
  };
  Latents<T> made;
  if (a.q_rank > 0) {
    l.q_a = project(l.n1.y, "attn.wq_a", h, a.q_rank);
    l.nq = normed(l.q_a, in_layer(layer, "attn.q_a.norm"));
    made.q = project(l.nq.y, "attn.wq_b", a.q_rank, query);
  } else {
    made.q = project(l.n1.y, "attn.wq", h, query);
  }
  l.kv_a = project(l.n1.y, "attn.wkv_a", h, a.kv_rank);
  l.nkv = normed(l.kv_a, in_layer(layer, "attn.kv_a.norm"));
  made.kv = project(l.nkv.y, "attn.wkv_b", a.kv_rank, model_.heads * (a.nope + a.v));
  made.k_rope = project(l.n1.y, "attn.wk_rope", h, a.rope);
  l.qkv = latent_heads(made, model_, theta(layer), s, text);
}

template <class T>
Text Trainer<T>::seen_in(int64_t layer, Text text) const {
  text.window = model_.is_local(layer) ? model_.window.tokens : 0;
  return text;
}

template <class T>
float Trainer<T>::theta(int64_t layer) const {
  return model_.is_local(layer) && model_.window.rope_theta > 0 ? model_.window.rope_theta : model_.rope_theta;
}

template <class T>
auto Trainer<T>::forward_layer(const Tensor<T>& x, int64_t layer, int64_t sequence, const Text& text) const -> LayerState {
  const int64_t s = train_.seq_len, h = model_.hidden, inner = model_.attention_rows();
  const auto name = [&](const char* part) { return in_layer(layer, part); };
  LayerState l;
  l.x = x;
  l.n1 = normed(x, name("attn.norm"));
  if (model_.is_latent())
    project_latents(l, layer, text);
  else
    l.qkv = linear(l.n1.y, value(name("attn.wqkv")), bias(name("attn.bqkv")), s, h, model_.qkv_rows());
  if (model_.qk_norm) {
    l.raw = l.qkv;
    l.qkv = norm_heads(l.raw, heads_, value(name("attn.q_norm.gamma")), value(name("attn.k_norm.gamma")), model_.norm_epsilon, s);
  }
  if (model_.is_llama() && !model_.is_latent()) rope(l.qkv, heads_, theta(layer), 1, s, text);
  l.attention = attention(l.qkv, heads_, s, seen_in(layer, text));
  Tensor<T> z = linear<T>(l.attention.o, value(name("attn.wo")), nullptr, s, inner, h);
  drop(z, layer, 1, sequence);
  l.x1 = add_residual(x, z, bias(name("attn.bo")), static_cast<size_t>(h));
  l.n2 = normed(l.x1, name("mlp.norm"));
  if (model_.is_mixture(layer)) {
    l.mixed = mix(l.n2.y, experts(layer), router_bias(layer), model_.experts, s, h, order_);
    z = l.mixed.z;
    if (const int64_t shared = model_.experts.shared * model_.experts.ffn; shared > 0) {
      l.u = linear<T>(l.n2.y, value(name("moe.shared.wup")), nullptr, s, h, 2 * shared);
      l.a = activation(l.u, true);
      l.shared = linear<T>(l.a, value(name("moe.shared.wdown")), nullptr, s, shared, h);
      if (model_.experts.shared_gate) l.gate = sigmoids(linear<T>(l.n2.y, value(name("moe.shared.gate")), nullptr, s, h, 1));
      z = add(z, model_.experts.shared_gate ? gated(l.shared, l.gate) : l.shared);
    }
    drop(z, layer, 2, sequence);
    l.y = add_residual<T>(l.x1, z, nullptr, static_cast<size_t>(h));
    return l;
  }
  l.u = linear(l.n2.y, value(name("mlp.wup")), bias(name("mlp.bup")), s, h, model_.up_rows());
  l.a = activation(l.u, model_.is_llama());
  z = linear<T>(l.a, value(name("mlp.wdown")), nullptr, s, model_.ffn, h);
  drop(z, layer, 2, sequence);
  l.y = add_residual(l.x1, z, bias(name("mlp.bdown")), static_cast<size_t>(h));
  return l;
}

template <class T>
std::vector<int32_t> Trainer<T>::stored(std::span<const int32_t> row, size_t ahead) const {
  std::vector<int32_t> ids;
  for (int64_t t = 0; t < train_.seq_len; ++t) ids.push_back(row[static_cast<size_t>(order_.position(t, train_.seq_len)) + ahead]);
  return ids;
}

template <class T>
Text Trainer<T>::text_of(std::span<const int32_t> row) const {
  if (!packed_) return order_;
  const auto positions = row.last(static_cast<size_t>(train_.seq_len));
  return Text(order_, std::vector<int64_t>(positions.begin(), positions.end()));
}

template <class T>
auto Trainer<T>::forward(std::span<const int32_t> row, int64_t sequence) const -> SequenceState {
  const std::vector<int32_t> ids = stored(row, 0), targets = this->targets(row);
  const int64_t s = train_.seq_len, h = model_.hidden;
  SequenceState state;
  state.text = text_of(row);
  Tensor<T> x;
  const Tensor<T>& table = value("embed.tokens");
  const Tensor<T>* positions = bias("embed.positions");
  for (int64_t t = 0; t < s; ++t)
    for (int64_t i = 0; i < h; ++i) {
      const T token = table[static_cast<size_t>(ids[static_cast<size_t>(t)] * h + i)];
      x.push_back(positions ? token + (*positions)[static_cast<size_t>(state.text.position(t, s) * h + i)] : token);
    }
  drop(x, -1, 0, sequence);
  for (int64_t layer = 0; layer < model_.layers; ++layer) {
    state.layers.push_back(forward_layer(x, layer, sequence, state.text));
    x = state.layers.back().y;
  }
  state.x = x;
  state.n = normed(x, "final.norm");
  const Tensor<T>& head = value(model_.tied_embeddings ? "embed.tokens" : "head.weight");
  const Tensor<T> logits = linear<T>(state.n.y, head, nullptr, s, h, model_.vocab_rows());
  state.entropy = cross_entropy(logits, targets.data(), s * sequences_, s, model_.vocab_rows(), model_.vocab);
  return state;
}

template <class T>
Tensor<T> Trainer<T>::logits(std::span<const int32_t> row, int64_t sequence) const {
  const Tensor<T>& head = value(model_.tied_embeddings ? "embed.tokens" : "head.weight");
  return linear<T>(forward(row, sequence).n.y, head, nullptr, train_.seq_len, model_.hidden, model_.vocab_rows());
}

template <class T>
Tensor<T> Trainer<T>::backward_norm(const Tensor<T>& dy, const Tensor<T>& x, const Normed<T>& saved, const std::string& name,
                                    Tensors<T>& gradients) const {
  const int64_t s = train_.seq_len;
  const auto h = static_cast<int64_t>(value(name + ".gamma").size());
  gradients[index(name + ".gamma")] = norm_weight(dy, x, saved, s, h);
  const bool centred = bias(name + ".beta") != nullptr;
  if (centred) gradients[index(name + ".beta")] = bias_gradient(dy, s, h);
  return norm_input(dy, x, value(name + ".gamma"), saved, centred, s, h);
}

template <class T>
Tensor<T> Trainer<T>::backward_layer(const LayerState& l, Tensor<T> dy, int64_t layer, int64_t sequence, const Text& text,
                                     Tensors<T>& gradients) const {
  const int64_t s = train_.seq_len, h = model_.hidden, inner = model_.attention_rows();
  const auto name = [&](const char* part) { return in_layer(layer, part); };
  // The input's and the weight's gradient of y = x w^T + bias.
  const auto backward_linear = [&](const Tensor<T>& dout, const Tensor<T>& x, const char* w, int64_t in, int64_t out) {
    gradients[index(name(w))] = linear_weight(x, dout, s, in, out);
    return linear_input(dout, value(name(w)), s, in, out);
  };
  const auto backward_bias = [&](const Tensor<T>& dout, const char* b, int64_t n) {
    if (bias(name(b))) gradients[index(name(b))] = bias_gradient(dout, s, n);
  };

  const auto backward_experts = [&](const Tensor<T>& dz) {
    ExpertGradients<T> g = mix_back(dz, l.n2.y, l.mixed, experts(layer), model_.experts, s, h, s * sequences_);
    gradients[index(name("moe.router"))] = std::move(g.router);
    gradients[index(name("moe.wup"))] = std::move(g.up);
    gradients[index(name("moe.wdown"))] = std::move(g.down);
    const int64_t shared = model_.experts.shared * model_.experts.ffn;
    if (shared == 0) return add(g.dx, g.routed);
    const bool by_gate = model_.experts.shared_gate;
    const Tensor<T> d_shared = by_gate ? gated(dz, l.gate) : dz;
    const Tensor<T> du = activation_input(backward_linear(d_shared, l.a, "moe.shared.wdown", shared, h), l.u, true);
    const Tensor<T> dn = add(add(g.dx, backward_linear(du, l.n2.y, "moe.shared.wup", h, 2 * shared)), g.routed);
    if (!by_gate) return dn;
    return add(dn, backward_linear(gate_back(dz, l.shared, l.gate), l.n2.y, "moe.shared.gate", h, 1));
  };
  const auto backward_mlp = [&](const Tensor<T>& dz) {
    const Tensor<T> da = backward_linear(dz, l.a, "mlp.wdown", model_.ffn, h);
    const Tensor<T> du = activation_input(da, l.u, model_.is_llama());
    backward_bias(du, "mlp.bup", model_.up_rows());
    return backward_linear(du, l.n2.y, "mlp.wup", h, model_.up_rows());
  };

  backward_bias(dy, "mlp.bdown", h);
  Tensor<T> dz = dy;
  drop(dz, layer, 2, sequence);
  const Tensor<T> dn2 = model_.is_mixture(layer) ? backward_experts(dz) : backward_mlp(dz);
  const Tensor<T> dx1 = add(dy, backward_norm(dn2, l.x1, l.n2, name("mlp.norm"), gradients));

  backward_bias(dx1, "attn.bo", h);
  dz = dx1;
  drop(dz, layer, 1, sequence);
  const Tensor<T> dout = backward_linear(dz, l.attention.o, "attn.wo", inner, h);
  Tensor<T> dqkv = attention_input(dout, l.attention, l.qkv, heads_, s, seen_in(layer, text));
  if (model_.is_latent()) {
    const LatentAttention& m = model_.latent;
    const Latents<T> g = latent_heads_back(dqkv, model_, theta(layer), s, text);
    const int64_t query = model_.heads * model_.head_dim;
    Tensor<T> dn1;
    if (m.q_rank > 0) {
      const Tensor<T> dy = backward_linear(g.q, l.nq.y, "attn.wq_b", m.q_rank, query);
      dn1 = backward_linear(backward_norm(dy, l.q_a, l.nq, name("attn.q_a.norm"), gradients), l.n1.y, "attn.wq_a", h, m.q_rank);
    } else {
      dn1 = backward_linear(g.q, l.n1.y, "attn.wq", h, query);
    }
    const Tensor<T> dy = backward_linear(g.kv, l.nkv.y, "attn.wkv_b", m.kv_rank, model_.heads * (m.nope + m.v));
    const Tensor<T> d_narrow = backward_norm(dy, l.kv_a, l.nkv, name("attn.kv_a.norm"), gradients);
    dn1 = add(dn1, backward_linear(d_narrow, l.n1.y, "attn.wkv_a", h, m.kv_rank));
    dn1 = add(dn1, backward_linear(g.k_rope, l.n1.y, "attn.wk_rope", h, m.rope));
    return add(dx1, backward_norm(dn1, l.x, l.n1, name("attn.norm"), gradients));
  }
  if (model_.is_llama()) rope(dqkv, heads_, theta(layer), -1, s, text);
  if (model_.qk_norm) {
    HeadGradients<T> g = norm_heads_back(dqkv, l.raw, heads_, value(name("attn.q_norm.gamma")), value(name("attn.k_norm.gamma")),
                                         model_.norm_epsilon, s);
    dqkv = std::move(g.dqkv);
    gradients[index(name("attn.q_norm.gamma"))] = std::move(g.gamma_q);
    gradients[index(name("attn.k_norm.gamma"))] = std::move(g.gamma_k);
  }
  backward_bias(dqkv, "attn.bqkv", model_.qkv_rows());
  const Tensor<T> dn1 = backward_linear(dqkv, l.n1.y, "attn.wqkv", h, model_.qkv_rows());
  return add(dx1, backward_norm(dn1, l.x, l.n1, name("attn.norm"), gradients));
}

template <class T>
Contribution<T> Trainer<T>::contribution(std::span<const int32_t> row, int64_t sequence) const {
  const int64_t s = train_.seq_len, h = model_.hidden;
  const SequenceState state = forward(row, sequence);
  Contribution<T> c;
  c.nll = state.entropy.nll;
  for (const LayerState& layer : state.layers) {
    if (!model_.experts.has_bias()) break;
    std::vector<int64_t> load(static_cast<size_t>(model_.experts.count));
    for (const auto& chosen : layer.mixed.chosen)
      for (const int64_t e : chosen) ++load[static_cast<size_t>(e)];
    c.load.push_back(std::move(load));
  }
  for (const Tensor<T>& value : values_) c.gradients.emplace_back(value.size(), T(0));

  const size_t embedding = index("embed.tokens");
  if (model_.tied_embeddings) c.gradients.emplace_back();
  const size_t head = model_.tied_embeddings ? c.gradients.size() - 1 : index("head.weight");
  c.gradients[head] = linear_weight(state.n.y, state.entropy.dlogits, s, h, model_.vocab_rows());
  const Tensor<T> dn =
      linear_input(state.entropy.dlogits, values_[model_.tied_embeddings ? embedding : head], s, h, model_.vocab_rows());
  Tensor<T> dx = backward_norm(dn, state.x, state.n, "final.norm", c.gradients);
  for (int64_t layer = model_.layers; layer-- > 0;)
    dx = backward_layer(state.layers[static_cast<size_t>(layer)], std::move(dx), layer, sequence, state.text, c.gradients);

  drop(dx, -1, 0, sequence);
  c.gradients[embedding] = embedding_weight(stored(row, 0).data(), dx, s, h, model_.vocab_rows());
  if (bias("embed.positions") != nullptr && packed_) {  // a row may be of several tokens
    std::vector<int32_t> positions;
    for (int64_t t = 0; t < s; ++t) positions.push_back(static_cast<int32_t>(state.text.position(t, s)));
    c.gradients[index("embed.positions")] = embedding_weight(positions.data(), dx, s, h, model_.max_positions);
  } else if (bias("embed.positions") != nullptr) {
    Tensor<T>& gradient = c.gradients[index("embed.positions")];
    for (int64_t t = 0; t < s; ++t)
      for (int64_t i = 0; i < h; ++i)
        gradient[static_cast<size_t>(state.text.position(t, s) * h + i)] = dx[static_cast<size_t>(t * h + i)];
  }
  return c;
}

template <class T>
Contribution<T> Trainer<T>::gradients(std::span<const int32_t> tokens) const {
  SHARDLAB_CHECK(tokens.size() == static_cast<size_t>(sequences_) * length(), "{} numbers for {} sequences of {}", tokens.size(),
                 sequences_, length());
  Contribution<T> sum = tree_sum(
      0, sequences_, [&](int64_t i) { return contribution(row(tokens, i), i); }, add_contributions<T>);
  if (model_.tied_embeddings) {
    Tensor<T>& embedding = sum.gradients[index("embed.tokens")];
    embedding = add(embedding, sum.gradients.back());
    sum.gradients.pop_back();
  }
  sum.nll = sum.nll * (T(1) / T(train_.seq_len * sequences_));
  return sum;
}

template <class T>
T Trainer<T>::loss(std::span<const int32_t> tokens) const {
  const T nll = tree<T>(sequences_, [&](int64_t i) { return forward(row(tokens, i), i).entropy.nll; });
  return nll * (T(1) / T(train_.seq_len * sequences_));
}

template <class T>
T Trainer<T>::objective(std::span<const int32_t> tokens) const {
  T total = loss(tokens);
  for (int64_t i = 0; i < sequences_ && model_.is_mixture(); ++i)
    for (const LayerState& layer : forward(row(tokens, i), i).layers)
      if (!layer.mixed.chosen.empty())
        total += router_losses(layer.mixed, model_.experts, train_.seq_len, train_.seq_len * sequences_);
  return total;
}

template <class T>
T Trainer<T>::validation_loss(std::span<const int32_t> tokens) const {
  Trainer still = *this;
  still.train_.dropout = 0;
  return still.loss(tokens);
}

namespace {

/// The learning rate of step n, counted from 0: warm-up peak (n + 1) / w; then, of the steps that are left to fall in, the share p
/// that has passed gives floor + (peak - floor) times 1 - p (linear; of WSD over its last steps) or (1 + cos(pi p)) / 2.
float scheduled_rate(const LearningRate& lr, int64_t n) {
  using Kind = LearningRate::Kind;
  const double peak = lr.peak, fall = lr.peak - lr.floor;
  if (n + 1 < lr.warmup_steps)
    return static_cast<float>(peak * (static_cast<double>(n + 1) / static_cast<double>(lr.warmup_steps)));
  if (lr.kind == Kind::kConstant) return lr.peak;
  const int64_t from = lr.kind == Kind::kWsd ? lr.total_steps - lr.decay_steps : lr.warmup_steps;
  double p = static_cast<double>(n - from) / static_cast<double>(lr.total_steps - from);
  if (p < 0) p = 0;
  if (p > 1) p = 1;  // the run goes on at the floor
  const double left = lr.kind == Kind::kCosine ? (std::cos(std::acos(-1.0) * p) + 1) / 2 : 1 - p;
  return static_cast<float>(double{lr.floor} + fall * left);
}

}  // namespace

template <class T>
void Trainer<T>::update_one(size_t parameter, const Tensor<T>& gradient) {
  const float lr = scheduled_rate(train_.learning_rate, step_);
  const float decay = decays(parameters_[parameter].kind) ? train_.weight_decay : 0.0f;
  switch (train_.optimizer) {
    case Optimizer::kSgd: return sgd(values_[parameter], gradient, lr, decay);
    case Optimizer::kLion:
      return lion(values_[parameter], first_moment_[parameter], gradient, {lr, train_.beta1, train_.beta2, decay});
    case Optimizer::kAdamW:
    case Optimizer::kAdamW8bit:
      return adamw(values_[parameter], first_moment_[parameter], second_moment_[parameter], gradient, step_,
                   {lr, train_.beta1, train_.beta2, train_.epsilon, decay});
  }
}

/// Moments are what their codes say when the next step begins.
template <class T>
void Trainer<T>::store_moments() {
  for (const auto& [moments, has_sign] : {std::pair{&first_moment_, true}, {&second_moment_, false}})
    for (const Block& block : blocks_) {
      std::vector<T> values;
      for (const auto& [parameter, element] : block) values.push_back((*moments)[parameter][element]);
      values = stored_in_8_bits(values, has_sign);
      for (size_t i = 0; i < block.size(); ++i) (*moments)[block[i].first][block[i].second] = values[i];
    }
}

/// min(1, clip_norm / (norm + 1e-6)) in fp64, rounded; then one product an element.
template <class T>
Tensors<T> Trainer<T>::clipped(Tensors<T> gradients) const {
  double squares = 0;
  for (const Tensor<T>& gradient : gradients)
    for (const T g : gradient) squares += static_cast<double>(g) * static_cast<double>(g);
  const T factor = static_cast<T>(std::min(1.0, static_cast<double>(train_.clip_norm) / (std::sqrt(squares) + 1e-6)));
  for (Tensor<T>& gradient : gradients)
    for (T& g : gradient) g *= factor;
  return gradients;
}

template <class T>
void Trainer<T>::update(const Tensors<T>& gradients) {
  const Tensors<T> clipped = train_.clip_norm > 0 ? this->clipped(gradients) : gradients;
  for (size_t i = 0; i < values_.size(); ++i) update_one(i, clipped[i]);
  if (train_.optimizer == Optimizer::kAdamW8bit) store_moments();
  ++step_;
}

template <class T>
T Trainer<T>::step(std::span<const int32_t> tokens) {
  const Contribution<T> sum = gradients(tokens);
  update(sum.gradients);
  follow(sum.load);
  return sum.nll;
}

template <class T>
void Trainer<T>::follow(const std::vector<std::vector<int64_t>>& load) {
  for (size_t l = 0; l < load.size(); ++l) follow_load(router_biases_[l], load[l], T(model_.experts.bias_update_rate));
}

template class Trainer<float>;
template class Trainer<double>;

}  // namespace shardlab::reference
