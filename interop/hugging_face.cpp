#include "interop/hugging_face.h"

#include <fmt/format.h>

#include <charconv>
#include <numeric>
#include <string_view>

#include "plan/base/check.h"
#include "plan/run_state.h"

namespace shardlab::interop {

namespace {

using Rows = std::vector<int64_t>;

Rows all_rows(int64_t n) {
  Rows rows(static_cast<size_t>(n));
  std::iota(rows.begin(), rows.end(), 0);
  return rows;
}

enum class Projection { kQuery, kKey, kValue };

/// Rows of the fused projection that are the queries, keys or values, by head: a group has its query heads, one key and one value head.
Rows attention_rows(const Model& m, Projection which) {
  const int64_t queries = m.heads / m.kv_heads, group = (queries + 2) * m.head_dim;
  const int64_t first = which == Projection::kQuery ? 0 : (queries + (which == Projection::kValue ? 1 : 0)) * m.head_dim;
  const int64_t count = (which == Projection::kQuery ? queries : 1) * m.head_dim;
  Rows rows;
  for (int64_t g = 0; g < m.kv_heads; ++g)
    for (int64_t r = 0; r < count; ++r) rows.push_back(g * group + first + r);
  return rows;
}

Rows every_second(int64_t n, int64_t first) {
  Rows rows;
  for (int64_t r = first; r < n; r += 2) rows.push_back(r);
  return rows;
}

/// Of `heads` heads, each `plain` rows and then `rotated` ones, ours in the order of DeepSeek's: of pair i first our row i, then row i +
/// rotated / 2.
Rows paired_rows(int64_t heads, int64_t plain, int64_t rotated) {
  Rows rows;
  for (int64_t head = 0; head < heads; ++head) {
    const int64_t first = head * (plain + rotated);
    for (int64_t r = 0; r < plain; ++r) rows.push_back(first + r);
    for (int64_t r = 0; r < rotated; ++r) rows.push_back(first + plain + r / 2 + r % 2 * (rotated / 2));
  }
  return rows;
}

class Names {
 public:
  explicit Names(const Model& model) : model_(model) {}

  std::vector<ForeignTensor> take() {
    const auto type = hugging_face_type(model_);
    mixtral_ = type.ok() && *type == "mixtral";
    for (const ModelParameter& p : carried_by_files(model_)) model_.is_llama() ? add_llama(p) : add_gpt(p);
    return std::move(tensors_);
  }

 private:
  /// Our name without its layer: "attn.wqkv".
  static std::string part_of(const ModelParameter& p) {
    if (p.layer < 0 || names_run_state(p.name)) return p.name;
    const size_t dot = p.name.find('.', std::string_view("layers.").size());
    return p.name.substr(dot + 1);
  }

  void add(const ModelParameter& p, std::string name, Rows rows, bool transposed = false) {
    std::vector<int64_t> shape{static_cast<int64_t>(rows.size())};
    if (p.shape.size() >= 2) shape.push_back(p.shape.back());
    if (transposed) std::swap(shape[0], shape[1]);
    tensors_.push_back({std::move(name), std::move(shape), {{p.name, std::move(rows)}}, transposed});
  }

  void add_llama(const ModelParameter& p) {
    const std::string layer = p.layer < 0 ? "model." : fmt::format("model.layers.{}.", p.layer), part = part_of(p);
    if (part == "attn.wqkv" || part == "attn.bqkv") {
      const char* what = part == "attn.wqkv" ? "weight" : "bias";
      add(p, fmt::format("{}self_attn.q_proj.{}", layer, what), attention_rows(model_, Projection::kQuery));
      add(p, fmt::format("{}self_attn.k_proj.{}", layer, what), attention_rows(model_, Projection::kKey));
      add(p, fmt::format("{}self_attn.v_proj.{}", layer, what), attention_rows(model_, Projection::kValue));
    } else if (part == "attn.wq" || part == "attn.wq_b") {
      add(p, layer + (part == "attn.wq" ? "self_attn.q_proj.weight" : "self_attn.q_b_proj.weight"),
          paired_rows(model_.heads, model_.latent.nope, model_.latent.rope));
    } else if (part == "attn.wk_rope") {  // behind the rows of attn.wkv_a, the parameter before it
      ForeignTensor& narrow = tensors_.back();
      narrow.parts.push_back({p.name, paired_rows(1, 0, model_.latent.rope)});
      narrow.shape[0] += model_.latent.rope;
    } else if (part == "mlp.wup") {
      add(p, layer + "mlp.gate_proj.weight", every_second(p.shape[0], 0));
      add(p, layer + "mlp.up_proj.weight", every_second(p.shape[0], 1));
    } else if (names_run_state(p.name)) {
      add(p, layer + "mlp.gate.e_score_correction_bias", all_rows(p.shape[0]));
    } else if (part.starts_with("moe.")) {
      add_experts(p, layer, part);
    } else {
      const std::pair<const char*, const char*> names[] = {{"embed.tokens", "embed_tokens.weight"},
                                                           {"attn.norm.gamma", "input_layernorm.weight"},
                                                           {"attn.wo", "self_attn.o_proj.weight"},
                                                           {"mlp.norm.gamma", "post_attention_layernorm.weight"},
                                                           {"mlp.wdown", "mlp.down_proj.weight"},
                                                           {"final.norm.gamma", "norm.weight"},
                                                           {"attn.q_norm.gamma", "self_attn.q_norm.weight"},
                                                           {"attn.k_norm.gamma", "self_attn.k_norm.weight"},
                                                           {"attn.wq_a", "self_attn.q_a_proj.weight"},
                                                           {"attn.q_a.norm.gamma", "self_attn.q_a_layernorm.weight"},
                                                           {"attn.wkv_a", "self_attn.kv_a_proj_with_mqa.weight"},
                                                           {"attn.kv_a.norm.gamma", "self_attn.kv_a_layernorm.weight"},
                                                           {"attn.wkv_b", "self_attn.kv_b_proj.weight"}};
      for (const auto& [ours, theirs] : names)
        if (part == ours) return add(p, layer + theirs, all_rows(p.shape[0]));
      SHARDLAB_CHECK(part == "head.weight", "llama has no `{}`", p.name);
      add(p, "lm_head.weight", all_rows(p.shape[0]));
    }
  }

  /// `layer`: "model.layers.3.". A tensor of each expert.
  void add_experts(const ModelParameter& p, const std::string& layer, const std::string& part) {
    const std::string block = layer + (mixtral_ ? "block_sparse_moe." : "mlp.");
    const std::string shared = block + (model_.experts.shared_gate ? "shared_expert" : "shared_experts");
    if (part == "moe.router") return add(p, block + "gate.weight", all_rows(p.shape[0]));
    if (part == "moe.shared.gate") return add(p, block + "shared_expert_gate.weight", all_rows(p.shape[0]));
    if (part == "moe.shared.wdown") return add(p, shared + ".down_proj.weight", all_rows(p.shape[0]));
    if (part == "moe.shared.wup") {
      add(p, shared + ".gate_proj.weight", every_second(p.shape[0], 0));
      return add(p, shared + ".up_proj.weight", every_second(p.shape[0], 1));
    }
    SHARDLAB_CHECK(part == "moe.wup" || part == "moe.wdown", "experts have no `{}`", p.name);
    for (int64_t e = 0; e < p.shape[0]; ++e) {
      const auto name = [&](const char* of_mixtral, const char* of_others) {
        return fmt::format("{}experts.{}.{}.weight", block, e, mixtral_ ? of_mixtral : of_others);
      };
      const auto rows = [&](int64_t first, int64_t step) {
        Rows list;
        for (int64_t r = first; r < p.shape[1]; r += step) list.push_back(e * p.shape[1] + r);
        return list;
      };
      if (part == "moe.wdown") {
        add(p, name("w2", "down_proj"), rows(0, 1));
        continue;
      }
      add(p, name("w1", "gate_proj"), rows(0, 2));
      add(p, name("w3", "up_proj"), rows(1, 2));
    }
  }

  void add_gpt(const ModelParameter& p) {
    const std::string layer = p.layer < 0 ? "transformer." : fmt::format("transformer.h.{}.", p.layer), part = part_of(p);
    if (part == "attn.wqkv" || part == "attn.bqkv") {
      Rows rows;
      for (const Projection which : {Projection::kQuery, Projection::kKey, Projection::kValue})
        for (const int64_t row : attention_rows(model_, which)) rows.push_back(row);
      const bool weight = part == "attn.wqkv";
      return add(p, layer + (weight ? "attn.c_attn.weight" : "attn.c_attn.bias"), std::move(rows), weight);
    }
    struct Name {
      const char *ours, *theirs;
      bool transposed = false;
    };
    const Name names[] = {
        {"embed.tokens", "wte.weight"},      {"embed.positions", "wpe.weight"},        {"attn.norm.gamma", "ln_1.weight"},
        {"attn.norm.beta", "ln_1.bias"},     {"attn.wo", "attn.c_proj.weight", true},  {"attn.bo", "attn.c_proj.bias"},
        {"mlp.norm.gamma", "ln_2.weight"},   {"mlp.norm.beta", "ln_2.bias"},           {"mlp.wup", "mlp.c_fc.weight", true},
        {"mlp.bup", "mlp.c_fc.bias"},        {"mlp.wdown", "mlp.c_proj.weight", true}, {"mlp.bdown", "mlp.c_proj.bias"},
        {"final.norm.gamma", "ln_f.weight"}, {"final.norm.beta", "ln_f.bias"}};
    for (const Name& name : names)
      if (part == name.ours) return add(p, layer + name.theirs, all_rows(p.shape[0]), name.transposed);
    SHARDLAB_CHECK(part == "head.weight", "gpt has no `{}`", p.name);
    add(p, "lm_head.weight", all_rows(p.shape[0]));
  }

  const Model& model_;
  bool mixtral_ = false;
  std::vector<ForeignTensor> tensors_;
};

/// Index of element (row, column) in a tensor of `rows` rows.
size_t index_of(const ForeignTensor& t, size_t row, size_t column, size_t rows, size_t columns) {
  return t.transposed ? column * rows + row : row * columns + column;
}

}  // namespace

std::vector<ModelParameter> carried_by_files(const Model& model) {
  std::vector<ModelParameter> all = parameters_of(model);
  for (int64_t layer = 0; model.experts.has_bias() && layer < model.layers; ++layer)
    if (model.is_mixture(layer))
      all.push_back({fmt::format("router_bias.layers.{}", layer), {model.experts.count}, layer, ModelParameter::Kind::kBias});
  return all;
}

Result<std::string> hugging_face_type(const Model& m) {
  const auto none = [&](std::string_view what) {
    return Error{ExitCode::kUsage,
                 fmt::format("{} is no model of transformers: {}", m.name, what),
                 "known: gpt2 llama mistral qwen2 qwen3 mixtral qwen2_moe qwen3_moe glm4_moe deepseek_v2 deepseek_v3",
                 {}};
  };
  if (!m.is_llama()) return m.has_windows() ? Result<std::string>(none("it attends within a window")) : std::string("gpt2");
  if (m.is_latent()) {
    const Experts& e = m.experts;
    if (m.has_windows()) return none("its attention is latent and within a window");
    if (!m.is_mixture() || e.shared < 1 || e.shared_gate || e.every != 1)
      return none("its attention is latent, and its layers are not dense first ones and then mixtures with ungated shared experts");
    if (e.sigmoid) return std::string("deepseek_v3");
    if (e.has_bias() || e.normalise)
      return none("its attention is latent, and its router a softmax with biases, or whose weights are divided by their sum");
    return std::string("deepseek_v2");
  }
  if (m.has_windows()) {
    if (m.window.rope_theta > 0) return none("its local layers have a rotary base of their own");
    const bool all = m.local_layers() == m.layers, plain = !m.is_mixture() && !m.qk_norm && !m.qkv_biases;
    if (plain)
      return all ? Result<std::string>("mistral") : none("some of its layers attend within a window, and its heads have no norms");
    if (m.is_mixture() && (m.qk_norm || m.qkv_biases || m.experts.shared > 0 || !all))
      return none("it has experts, and is no Mixtral whose layers all attend within a window");
  }
  if (!m.is_mixture()) {
    if (m.qk_norm && m.qkv_biases) return none("its heads have norms, and q, k and v biases");
    return std::string(m.qk_norm ? "qwen3" : m.qkv_biases ? "qwen2" : "llama");
  }
  const Experts& e = m.experts;
  if (e.sigmoid) {
    if (e.every != 1) return none("its router is of sigmoids, and some layers between those with experts have none");
    if (e.shared < 1 || e.shared_gate) return none("its router is of sigmoids, and no ungated shared experts are beside it");
    return std::string("glm4_moe");
  }
  if (e.has_bias() || e.groups != 1 || e.factor != 1)
    return none("its router is a softmax, with biases, groups or a factor besides");
  if (e.shared > 0) {
    if (!e.shared_gate || m.qk_norm) return none("its shared experts have no gate, or its heads have norms besides");
    return std::string("qwen2_moe");
  }
  if (m.qkv_biases) return none("its experts are not shared, and q, k and v have biases");
  if (m.qk_norm) return std::string("qwen3_moe");
  if (!e.normalise || e.dense_layers != 0 || e.every != 1)
    return none("its weights of experts are not normalised, or some of its layers have none, and its heads have no norms");
  return std::string("mixtral");
}

std::vector<ForeignTensor> foreign_tensors(const Model& model) { return Names(model).take(); }

std::vector<float> to_foreign(const ForeignTensor& tensor, size_t part, const std::vector<float>& ours, int64_t columns) {
  const Rows& rows = tensor.parts[part].rows;
  const auto width = static_cast<size_t>(columns);
  std::vector<float> theirs(rows.size() * width);
  for (size_t r = 0; r < rows.size(); ++r)
    for (size_t c = 0; c < width; ++c)
      theirs[index_of(tensor, r, c, rows.size(), width)] = ours[static_cast<size_t>(rows[r]) * width + c];
  return theirs;
}

void from_foreign(const ForeignTensor& tensor, size_t part, const std::vector<float>& theirs, int64_t columns,
                  std::vector<float>& ours) {
  const auto width = static_cast<size_t>(columns);
  size_t first = 0;  // of the part's values
  for (size_t before = 0; before < part; ++before) first += tensor.parts[before].rows.size() * width;
  const Rows& rows = tensor.parts[part].rows;
  for (size_t r = 0; r < rows.size(); ++r)
    for (size_t c = 0; c < width; ++c)
      ours[static_cast<size_t>(rows[r]) * width + c] = theirs[first + index_of(tensor, r, c, rows.size(), width)];
}

std::vector<std::string> other_names(const ForeignTensor& tensor) {
  for (const std::string_view prefix : {"transformer.", "model."})
    if (tensor.name.starts_with(prefix)) return {tensor.name.substr(prefix.size())};
  return {};
}

bool is_derived_tensor(const std::string& name, const Model& m) {
  if (name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias") || name.ends_with("rotary_emb.inv_freq")) return true;
  constexpr std::string_view kLayers = "model.layers.";
  if (int64_t layer = -1; m.is_latent() && name.starts_with(kLayers)) {
    std::from_chars(name.data() + kLayers.size(), name.data() + name.size(), layer);
    if (layer >= m.layers) return true;
  }
  return m.tied_embeddings && name == "lm_head.weight";
}

}  // namespace shardlab::interop
