#include "sweeps/models.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>

#include "plan/base/files.h"
#include "plan/base/json_depth.h"
#include "plan/base/json_fault.h"
#include "plan/base/limits.h"
#include "plan/base/once_per_name.h"
#include "sweeps/names.h"
#include "sweeps/presets.h"
#include "sweeps/yaml.h"

namespace shardlab::sweeps {

namespace {

using Json = nlohmann::json;

/// A value as a message quotes it.
std::string shown(const Json& value) {
  const std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  return text.size() <= limits::kShownBytes ? text
                                            : fmt::format("{}... ({} bytes)", text.substr(0, limits::kShownBytes), text.size());
}

/// The file as JSON; discarded where it is none. `error` says what is beyond a bound.
Json parse_json(std::string_view text, std::string& error) {
  if (static_cast<int64_t>(text.size()) > limits::kModelFileBytes) {
    error = fmt::format("has {} bytes, more than the {} that are read of a config.json", text.size(), limits::kModelFileBytes);
    return Json(Json::value_t::discarded);
  }
  if (json_depth(text) > limits::kJsonDepth) {
    error = fmt::format("is nested more than {} levels deep", limits::kJsonDepth);
    return Json(Json::value_t::discarded);
  }
  return Json::parse(text, nullptr, /*allow_exceptions=*/false);
}

/// Reads keys of one config.json; the first thing wrong is kept.
class ConfigReader {
 public:
  static constexpr uint64_t kMostSize = uint64_t{1} << 48;

  /// `lenient`: a size that is missing is looked for under the names that other files have for it, and else 0.
  ConfigReader(const Json& json, const std::string& name, bool lenient) : json_(json), name_(name), lenient_(lenient) {}

  bool has(const char* key) const { return json_.contains(key) && !json_[key].is_null(); }

  int64_t size(const char* key) {
    if (!has(key) && lenient_) {
      for (const auto& [known, other] : kOtherNames)
        if (std::string_view(known) == key && has(other)) return size_or(other, 0);
      return 0;
    }
    if (json_.contains(key) && json_[key].is_null())
      refuse(fmt::format("`{}` is null", key), "write a whole number");
    else if (!has(key))
      refuse(fmt::format("`{}` is missing, which a config.json{} needs", key, of_type()),
             fmt::format("add `{}`, or take the config.json of the model's repository", key));
    return size_or(key, 0);
  }
  int64_t size_or(const char* key, int64_t otherwise) {
    if (!has(key)) return otherwise;
    const Json& value = json_[key];
    if (!value.is_number_integer()) {
      refuse(fmt::format("`{}` is {}", key, shown(value)), "a whole number is expected");
      return otherwise;
    }
    // Readers add and multiply by small numbers before `check` looks at the sizes more closely.
    const bool fits =
        value.is_number_unsigned() ? value.get<uint64_t>() < kMostSize : value.get<int64_t>() > -static_cast<int64_t>(kMostSize);
    if (fits) return value.get<int64_t>();
    refuse(fmt::format("`{}` is {}, beyond 2^48", key, shown(value)), "write a size that a model can have");
    return otherwise;
  }
  float number_or(const char* key, float otherwise) {
    if (!has(key)) return otherwise;
    const double value = json_[key].is_number() ? json_[key].get<double>() : std::numeric_limits<double>::infinity();
    if (std::abs(value) <= std::numeric_limits<float>::max()) return static_cast<float>(value);
    refuse(fmt::format("`{}` is {}, not a number of single precision", key, shown(json_[key])), "write a number");
    return otherwise;
  }
  bool lenient() const { return lenient_; }
  /// A window of `window.tokens` in the layers that `layer_types` calls sliding, else as `window` says. A window that hides nothing, and one
  /// that no layer has, is none.
  void read_layers_of(SlidingWindow window, Model& m) {
    if (has("layer_types")) window = layers_named(window, m.layers);
    m.window = window;
    const bool hides = m.local_layers() > 0 && (m.max_positions == 0 || window.tokens < m.max_positions);
    if (window.tokens > 0 && !hides) m.window = {};
    if (!hides) irregular_.clear();
  }
  bool flag_or(const char* key, bool otherwise) {
    if (!has(key)) return otherwise;
    if (json_[key].is_boolean()) return json_[key].get<bool>();
    refuse(fmt::format("`{}` is {}, not true or false", key, shown(json_[key])), "write true or false");
    return otherwise;
  }
  std::string text_or(const char* key, const std::string& otherwise) {
    if (!has(key)) return otherwise;
    if (json_[key].is_string()) return json_[key].get<std::string>();
    refuse(fmt::format("`{}` is {}, not a text", key, shown(json_[key])), "write a text in quotes");
    return otherwise;
  }
  /// The key must have one of these values; its absence means the first.
  void must_be(const char* key, std::initializer_list<const char*> values) {
    const std::string value = text_or(key, *values.begin());
    if (std::find(values.begin(), values.end(), value) == values.end())
      refuse(fmt::format("`{}` is \"{}\", which is not implemented{}", key, value, of_type(" for")),
             fmt::format("write {}{}", values.size() == 1 ? "" : "one of: ", fmt::join(values, " ")));
  }
  /// A list of layers that must be the first ones; how many. 0 where the key is absent.
  int64_t leading_layers(const char* key) {
    if (!has(key)) return 0;
    const Json& list = json_[key];
    int64_t count = 0;
    if (list.is_array())
      for (const Json& layer : list) count += layer.is_number_integer() && layer.get<int64_t>() == count ? 1 : int64_t{1} << 31;
    if (list.is_array() && count <= static_cast<int64_t>(list.size())) return count;
    refuse(fmt::format("`{}` is {}, which is not implemented", key, shown(list)), "implemented: none, or the first layers: [0, 1]");
    return 0;
  }
  void must_be_off(const char* key) {
    if (flag_or(key, false)) refuse(fmt::format("`{}` is true, which is not implemented", key), "implemented: false");
  }
  void refuse(std::string message, std::string hint) {
    if (!error_) error_ = Error{ExitCode::kUsage, std::move(message), std::move(hint), name_};
  }
  const std::optional<Error>& error() const { return error_; }
  /// Where `layer_types` leaves the pattern that plans have; empty: nowhere.
  const std::string& irregular() const { return irregular_; }

 private:
  /// The window in the layers that `layer_types` calls sliding. Plans have windows in all layers from one on, but perhaps every n-th. Of
  /// other patterns the layers are counted (`irregular`), which is what an estimate reads.
  SlidingWindow layers_named(SlidingWindow window, int64_t layers) {
    const Json& list = json_["layer_types"];
    const auto refused = [&](std::string message, const char* hint) {
      refuse(std::move(message), hint);
      return SlidingWindow{};
    };
    if (!list.is_array() || static_cast<int64_t>(list.size()) != layers)
      return refused(fmt::format("`layer_types` is {}, no list of {} layers", shown(list), layers), "one word a layer");
    for (const Json& type : list)
      if (type != "sliding_attention" && type != "full_attention")
        return refused(fmt::format("`layer_types` has {}", shown(type)), "implemented: sliding_attention and full_attention");
    const auto next = [&](int64_t from, const char* word) {
      while (from < layers && list[static_cast<size_t>(from)] != word) ++from;
      return from;
    };
    window.global_layers = next(0, "sliding_attention");
    const int64_t again = next(window.global_layers, "full_attention");
    window.global_every = again < layers ? again - window.global_layers + 1 : 0;
    if (window.global_layers == layers) return {};
    Model m;
    m.layers = layers, m.window = window;
    for (int64_t layer = 0; layer < layers; ++layer)
      if (m.is_local(layer) != (list[static_cast<size_t>(layer)] == "sliding_attention")) {
        irregular_ = fmt::format("`layer_types` has {} at layer {}, which breaks the pattern of the layers before",
                                 shown(list[static_cast<size_t>(layer)]), layer);
        window.global_layers = std::count(list.begin(), list.end(), Json("full_attention")), window.global_every = 0;
        break;
      }
    return window;
  }
  /// " of model_type llama", where the file says one.
  std::string of_type(const char* preposition = " of") const {
    const auto type = json_.find("model_type");
    return type == json_.end() || !type->is_string() ? "" : fmt::format("{} model_type {}", preposition, type->get<std::string>());
  }

  static constexpr std::pair<const char*, const char*> kOtherNames[] = {
      {"num_hidden_layers", "num_layers"}, {"num_hidden_layers", "n_layer"},     {"num_hidden_layers", "n_layers"},
      {"hidden_size", "n_embd"},           {"hidden_size", "d_model"},           {"num_attention_heads", "n_head"},
      {"num_attention_heads", "n_heads"},  {"num_attention_heads", "num_heads"}, {"intermediate_size", "ffn_hidden_size"},
      {"intermediate_size", "ffn_dim"},    {"intermediate_size", "n_inner"},     {"vocab_size", "padded_vocab_size"}};

  const Json& json_;
  const std::string& name_;
  bool lenient_;
  std::string irregular_;
  std::optional<Error> error_;
};

void read_gpt(ConfigReader& in, Model& m) {
  m.family = Family::kGpt;
  m.layers = in.size("n_layer");
  m.hidden = in.size("n_embd");
  m.heads = in.size("n_head");
  m.kv_heads = m.heads;
  m.ffn = in.size_or("n_inner", 4 * m.hidden);
  m.vocab = in.size("vocab_size");
  m.max_positions = in.size("n_positions");
  m.tied_embeddings = in.flag_or("tie_word_embeddings", true);
  m.norm_epsilon = in.number_or("layer_norm_epsilon", 1e-5f);
  in.must_be("activation_function", {"gelu_new", "gelu_pytorch_tanh"});
  in.must_be_off("scale_attn_by_inverse_layer_idx");
  if (m.heads > 0 && m.hidden % m.heads != 0)
    in.refuse(fmt::format("n_embd {} is not divisible by n_head {}", m.hidden, m.heads), "every head has n_embd / n_head elements");
  m.head_dim = m.heads > 0 ? m.hidden / m.heads : 0;
}

/// Sizes in the words of most files.
void read_sizes(ConfigReader& in, Model& m) {
  m.family = Family::kLlama;
  m.layers = in.size("num_hidden_layers");
  m.hidden = in.size("hidden_size");
  m.heads = in.size("num_attention_heads");
  m.kv_heads = in.size_or("num_key_value_heads", m.heads);
  m.head_dim = in.size_or("head_dim", m.heads > 0 ? m.hidden / m.heads : 0);
  if (!in.has("head_dim") && m.heads > 0 && m.hidden % m.heads != 0)
    in.refuse(
        fmt::format("hidden_size {} is not divisible by num_attention_heads {}, and head_dim is not given", m.hidden, m.heads),
        "add `head_dim`, or correct one of the two");
  m.ffn = in.size("intermediate_size");
  m.vocab = in.size("vocab_size");
  m.max_positions = in.size_or("max_position_embeddings", 0);
  m.norm_epsilon = in.number_or("rms_norm_eps", 1e-6f);
  m.rope_theta = in.number_or("rope_theta", 10000.0f);
}

/// A window of all layers (Mistral, Phi-3), or that Qwen states beside the switch that turns it on and the number of first layers without.
void read_window(ConfigReader& in, Model& m, bool switched) {
  if (const int64_t tokens = in.size_or("sliding_window", 0); tokens != 0 && in.flag_or("use_sliding_window", !switched))
    in.read_layers_of({.tokens = tokens, .global_layers = switched ? in.size_or("max_window_layers", 28) : 0}, m);
}

void read_llama_sizes(ConfigReader& in, Model& m, bool switched = false) {
  read_sizes(in, m);
  read_window(in, m, switched);
  m.tied_embeddings = in.flag_or("tie_word_embeddings", false);
  if (!in.lenient()) in.must_be("hidden_act", {"silu", "swish"});
}

void read_llama_like(ConfigReader& in, ModelConfig& c, bool switched) {
  read_llama_sizes(in, c.model, switched);
  if (in.lenient()) return;
  in.must_be_off("attention_bias");
  in.must_be_off("mlp_bias");
}

void read_llama(ConfigReader& in, ModelConfig& c) { read_llama_like(in, c, false); }

void read_qwen2(ConfigReader& in, ModelConfig& c) {
  read_llama_sizes(in, c.model, true);
  c.model.qkv_biases = c.qkv_biases = true;
}

/// Routed experts in the words of Qwen2-MoE and Qwen3-MoE.
void read_experts(ConfigReader& in, ModelConfig& c) {
  c.experts = in.has("num_experts") ? in.size("num_experts") : in.size("num_local_experts");
  c.top_k = in.size("num_experts_per_tok");
  c.moe_ffn = in.size("moe_intermediate_size");
  const int64_t step = in.size_or("decoder_sparse_step", 1);
  if (step < 1) in.refuse(fmt::format("`decoder_sparse_step` is {}", step), "write 1, or a larger number");
  c.model.experts = {.count = c.experts,
                     .top_k = c.top_k,
                     .ffn = c.moe_ffn,
                     .normalise = in.flag_or("norm_topk_prob", false),
                     .balance = in.number_or("router_aux_loss_coef", 0.0f),
                     .dense_layers = in.leading_layers("mlp_only_layers"),
                     .every = std::max<int64_t>(1, step)};
  c.dense_layers = c.model.layers - c.model.mixture_layers();
}

/// Biases of q, k and v; layers with experts, of which every token passes one more, gated (transformers, Qwen2MoeConfig).
void read_qwen2_moe(ConfigReader& in, ModelConfig& c) {
  read_llama_sizes(in, c.model, true);
  in.must_be_off("use_sliding_window");
  c.model.qkv_biases = c.qkv_biases = in.flag_or("qkv_bias", true);
  read_experts(in, c);
  const int64_t shared = in.size("shared_expert_intermediate_size");
  if (c.moe_ffn > 0 && (shared < 0 || shared % c.moe_ffn != 0))
    in.refuse(fmt::format("`shared_expert_intermediate_size` is {}, no multiple of `moe_intermediate_size` {}", shared, c.moe_ffn),
              "the shared expert is as wide as a whole number of experts, in this version");
  else if (c.moe_ffn > 0)
    c.shared_experts = c.model.experts.shared = shared / c.moe_ffn;
  c.shared_gate = c.model.experts.shared_gate = shared > 0;
}

void read_qwen3(ConfigReader& in, ModelConfig& c) {
  read_llama_like(in, c, true);
  c.model.qk_norm = c.qk_norm = true;
}

void read_mixtral(ConfigReader& in, ModelConfig& c) {
  read_llama(in, c);
  c.experts = in.size("num_local_experts"), c.top_k = in.size("num_experts_per_tok");
  c.moe_ffn = c.model.ffn;
  c.model.experts = {.count = c.experts, .top_k = c.top_k, .ffn = c.moe_ffn, .balance = in.number_or("router_aux_loss_coef", 0.0f)};
}

void read_qwen3_moe(ConfigReader& in, ModelConfig& c) {
  in.must_be_off("use_sliding_window");
  read_qwen3(in, c);
  read_experts(in, c);
}

/// Latent attention, and experts after the first layers, in the words of DeepSeek.
void read_deepseek(ConfigReader& in, ModelConfig& c) {
  read_llama(in, c);
  c.experts = in.size("n_routed_experts"), c.top_k = in.size("num_experts_per_tok");
  c.moe_ffn = in.size("moe_intermediate_size");
  c.shared_experts = in.size_or("n_shared_experts", 0);
  c.dense_layers = in.size_or("first_k_dense_replace", 0);
  c.q_rank = in.size_or("q_lora_rank", 0), c.kv_rank = in.size("kv_lora_rank");
  c.nope_dim = in.size("qk_nope_head_dim"), c.rope_dim = in.size("qk_rope_head_dim"), c.v_dim = in.size("v_head_dim");
  c.rotary_pairs = in.flag_or("rope_interleave", true);
  c.model.latent = {.q_rank = c.q_rank, .kv_rank = c.kv_rank, .nope = c.nope_dim, .rope = c.rope_dim, .v = c.v_dim};
  c.model.head_dim = c.nope_dim + c.rope_dim;
  c.model.kv_heads = c.model.heads;  // every head has k and v of its own, made from one latent
  if (const int64_t frequency = in.size_or("moe_layer_freq", 1); frequency != 1)
    in.refuse(fmt::format("`moe_layer_freq` is {}, which is not implemented", frequency), "implemented: 1");
  c.model.experts = {.count = c.experts,
                     .top_k = c.top_k,
                     .ffn = c.moe_ffn,
                     .balance = in.number_or("aux_loss_alpha", 0.0f),
                     .shared = c.shared_experts,
                     .dense_layers = c.dense_layers};
}

/// Sigmoids, and biases of routers (DeepSeek-V3, section 2.1.2). Their step is no key of a config.json: that of section 4.2.
void read_deepseek_v3(ConfigReader& in, ModelConfig& c) {
  read_deepseek(in, c);
  in.must_be("scoring_func", {"sigmoid"});
  in.must_be("topk_method", {"noaux_tc"});
  c.router_bias = false;  // state of the run, and no parameter
  Experts& e = c.model.experts;
  e.sigmoid = true;
  e.normalise = in.flag_or("norm_topk_prob", true);
  e.factor = in.number_or("routed_scaling_factor", 1.0f);
  e.groups = in.size_or("n_group", 1), e.groups_chosen = in.size_or("topk_group", 1);
  e.bias_update_rate = 0.001f;
}

/// The softmax over all experts; weights are divided by their sum, or else multiplied by a factor (DeepSeek-V2, section 2.2; the modeling file
/// of its repository).
void read_deepseek_v2(ConfigReader& in, ModelConfig& c) {
  read_deepseek(in, c);
  in.must_be("scoring_func", {"softmax"});
  in.must_be("topk_method", {"greedy", "group_limited_greedy"});
  Experts& e = c.model.experts;
  e.normalise = in.flag_or("norm_topk_prob", false);
  if (!e.normalise) e.factor = in.number_or("routed_scaling_factor", 1.0f);
  if (in.text_or("topk_method", "greedy") == "group_limited_greedy")
    e.groups = in.size_or("n_group", 1), e.groups_chosen = in.size_or("topk_group", 1);
}

void read_gemma2(ConfigReader& in, ModelConfig& c) {
  read_sizes(in, c.model);
  c.model.head_dim = in.size_or("head_dim", 256);
  c.model.tied_embeddings = in.flag_or("tie_word_embeddings", true);
  in.must_be("hidden_activation", {"gelu_pytorch_tanh"});
  in.must_be_off("attention_bias");
  in.read_layers_of({.tokens = in.size_or("sliding_window", 4096), .global_every = 2}, c.model);
  c.post_norms = true;
  c.unexecuted = "its feed-forward is gated by gelu, and norms follow attention and feed-forward";
}

/// Files leave out what their library has by default (transformers, Gemma3TextConfig).
void read_gemma3(ConfigReader& in, ModelConfig& c) {
  Model& m = c.model;
  m.family = Family::kLlama;
  m.layers = in.size("num_hidden_layers"), m.hidden = in.size("hidden_size"), m.ffn = in.size("intermediate_size");
  m.heads = in.size_or("num_attention_heads", 8), m.kv_heads = in.size_or("num_key_value_heads", 4);
  m.head_dim = in.size_or("head_dim", 256);
  m.vocab = in.size_or("vocab_size", 262208), m.max_positions = in.size_or("max_position_embeddings", 131072);
  m.tied_embeddings = in.flag_or("tie_word_embeddings", true);
  m.norm_epsilon = in.number_or("rms_norm_eps", 1e-6f), m.rope_theta = in.number_or("rope_theta", 1e6f);
  in.must_be("hidden_activation", {"gelu_pytorch_tanh"});
  in.must_be_off("attention_bias");
  in.read_layers_of({.tokens = in.size_or("sliding_window", 1024),
                     .global_every = in.size_or("sliding_window_pattern", 6),
                     .rope_theta = in.number_or("rope_local_base_freq", 10000.0f)},
                    m);
  c.post_norms = c.qk_norm = true;
  c.unexecuted = "its feed-forward is gated by gelu, and norms follow attention and feed-forward";
}

/// The share of each head that is rotated changes neither size nor work that counts.
bool rotates_part(ConfigReader& in) { return in.number_or("partial_rotary_factor", 1.0f) != 1.0f; }

void read_phi3(ConfigReader& in, ModelConfig& c) {
  read_sizes(in, c.model);
  c.model.tied_embeddings = in.flag_or("tie_word_embeddings", false);
  in.must_be("hidden_act", {"silu", "swish"});
  in.must_be_off("attention_bias");
  if (rotates_part(in)) c.unexecuted = "it rotates a part of each head";
  read_window(in, c.model, false);
}

void read_olmo2(ConfigReader& in, ModelConfig& c) {
  read_llama(in, c);
  c.qk_norm_whole = true;
  c.unexecuted = "its norms follow attention and feed-forward, and it has norms over q and k";
}

void read_glm(ConfigReader& in, ModelConfig& c) {
  read_llama_sizes(in, c.model);
  c.qkv_biases = in.flag_or("attention_bias", false);
  c.unexecuted = "it rotates a part of each head";
}

void read_glm4(ConfigReader& in, ModelConfig& c) {
  read_glm(in, c);
  c.post_norms = true;
  c.unexecuted = "it rotates a part of each head, and norms follow attention and feed-forward";
}

/// transformers, Glm4MoeConfig. The step of the biases of routers is no key of a config.json: that of DeepSeek-V3, section 4.2.
void read_glm4_moe(ConfigReader& in, ModelConfig& c) {
  read_glm(in, c);
  c.experts = in.size("n_routed_experts"), c.top_k = in.size("num_experts_per_tok");
  c.moe_ffn = in.size("moe_intermediate_size");
  c.shared_experts = in.size_or("n_shared_experts", 0);
  c.dense_layers = in.size_or("first_k_dense_replace", 0);
  c.qk_norm = in.flag_or("use_qk_norm", false);
  c.router_bias = true;
  c.unexecuted = kMixture;
  if (in.number_or("partial_rotary_factor", 0.5f) != 1.0f) return;
  c.unexecuted.clear();
  c.router_bias = false;  // state of the run, and no parameter
  c.model.qkv_biases = c.qkv_biases, c.model.qk_norm = c.qk_norm;
  c.model.experts = {.count = c.experts,
                     .top_k = c.top_k,
                     .ffn = c.moe_ffn,
                     .sigmoid = true,
                     .normalise = in.flag_or("norm_topk_prob", true),
                     .factor = in.number_or("routed_scaling_factor", 1.0f),
                     .shared = c.shared_experts,
                     .dense_layers = c.dense_layers,
                     .groups = in.size_or("n_group", 1),
                     .groups_chosen = in.size_or("topk_group", 1),
                     .bias_update_rate = 0.001f};
}

void read_gpt_oss(ConfigReader& in, ModelConfig& c) {
  read_sizes(in, c.model);
  c.model.tied_embeddings = in.flag_or("tie_word_embeddings", false);
  in.must_be("hidden_act", {"silu"});
  c.qkv_biases = c.out_bias = in.flag_or("attention_bias", true);
  c.sinks = c.expert_biases = true;
  c.experts = in.size("num_local_experts"), c.top_k = in.size("num_experts_per_tok");
  c.moe_ffn = c.model.ffn;
  in.read_layers_of({.tokens = in.size_or("sliding_window", 128), .global_every = 2}, c.model);
  c.unexecuted = "its heads have sinks, and its experts and their router biases";
}

void read_gpt_neox(ConfigReader& in, ModelConfig& c) {
  read_sizes(in, c.model);
  c.model.family = Family::kGpt;
  c.model.kv_heads = c.model.heads;
  c.model.tied_embeddings = in.flag_or("tie_word_embeddings", false);
  c.model.norm_epsilon = in.number_or("layer_norm_eps", 1e-5f);
  in.must_be("hidden_act", {"gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"});
  if (!in.flag_or("attention_bias", true)) in.refuse("`attention_bias` is false, which is not implemented", "implemented: true");
  c.rotary = true;
  c.unexecuted = "its positions are rotary, and attention and feed-forward read the same input";
}

/// Sizes that only a prediction reads: none negative or so large that products overflow.
Result<void> check_sizes(const ModelConfig& c) {
  const auto refusal = [](std::string message, std::string hint) {
    return Error{ExitCode::kUsage, std::move(message), std::move(hint), {}};
  };
  for (const auto& [name, value] : {std::pair{"experts", c.experts},
                                    {"experts a token", c.top_k},
                                    {"moe_ffn", c.moe_ffn},
                                    {"shared experts", c.shared_experts},
                                    {"dense layers", c.dense_layers},
                                    {"q_lora_rank", c.q_rank},
                                    {"kv_lora_rank", c.kv_rank},
                                    {"qk_nope_head_dim", c.nope_dim},
                                    {"qk_rope_head_dim", c.rope_dim},
                                    {"v_head_dim", c.v_dim}})
    if (value < 0 || value >= int64_t{1} << 31)
      return refusal(fmt::format("{}={} is outside [0, 2^31)", name, value), "write a size that a model can have");
  const bool mixture = c.unexecuted.find("experts") != std::string::npos || c.model.experts != Experts{};
  if (mixture && (c.experts < 1 || c.top_k < 1 || c.top_k > c.experts || c.moe_ffn < 1 || c.dense_layers > c.model.layers))
    return refusal(fmt::format("{} experts, {} a token, of width {}, after {} dense layers of {}", c.experts, c.top_k, c.moe_ffn,
                               c.dense_layers, c.model.layers),
                   "a token passes from 1 to all experts, and there are no more dense layers than layers");
  return {};
}

using Reader = void (*)(ConfigReader&, ModelConfig&);
constexpr std::pair<std::string_view, Reader> kReaders[] = {
    {"gpt2", [](ConfigReader& in, ModelConfig& c) { read_gpt(in, c.model); }},
    {"llama", read_llama},
    {"mistral", read_llama},
    {"qwen2", read_qwen2},
    {"qwen2_moe", read_qwen2_moe},
    {"qwen3", read_qwen3},
    {"mixtral", read_mixtral},
    {"qwen3_moe", read_qwen3_moe},
    {"deepseek_v2", read_deepseek_v2},
    {"deepseek_v3", read_deepseek_v3},
    {"kimi_k2", read_deepseek_v3},
    {"gemma2", read_gemma2},
    {"gemma3_text", read_gemma3},
    {"phi3", read_phi3},
    {"olmo2", read_olmo2},
    {"glm", read_glm},
    {"glm4", read_glm4},
    {"glm4_moe", read_glm4_moe},
    {"gpt_oss", read_gpt_oss},
    {"gpt_neox", read_gpt_neox}};

}  // namespace

std::vector<std::string> list_models() {
  std::vector<std::string> names;
  for (const Preset& preset : model_presets()) names.emplace_back(preset.name);
  return names;
}

std::vector<std::string> model_types() {
  std::vector<std::string> types;
  for (const auto& [type, read] : kReaders) types.emplace_back(type);
  return types;
}

std::string describe(const ModelConfig& c) {
  return fmt::format(
             "{} {} biases {} {} {} norms {} {} {} sinks {} rotary {} window {} of {} experts {} {} {} {} {} {} latent {} {} {} {} "
             "{}",
             c.type, c.unexecuted, c.qkv_biases, c.out_bias, c.expert_biases, c.qk_norm, c.qk_norm_whole, c.post_norms, c.sinks,
             c.rotary, c.model.window.tokens, c.model.local_layers(), c.experts, c.top_k, c.moe_ffn, c.shared_experts,
             c.dense_layers, c.router_bias, c.q_rank, c.kv_rank, c.nope_dim, c.rope_dim, c.v_dim) +
         (c.shared_gate ? " gated" : "");
}

namespace {

/// A message about keys of a case, "model.layers", in the words of the config.json that said them: "num_hidden_layers".
std::string in_words_of(const Json& json, std::string message) {
  constexpr std::pair<std::string_view, const char*> kWords[] = {{"model.layers", "num_hidden_layers"},
                                                                 {"model.layers", "n_layer"},
                                                                 {"model.hidden", "hidden_size"},
                                                                 {"model.hidden", "n_embd"},
                                                                 {"model.heads", "num_attention_heads"},
                                                                 {"model.heads", "n_head"},
                                                                 {"model.kv_heads", "num_key_value_heads"},
                                                                 {"model.ffn", "intermediate_size"},
                                                                 {"model.ffn", "n_inner"},
                                                                 {"model.head_dim", "head_dim"},
                                                                 {"model.vocab", "vocab_size"},
                                                                 {"model.max_positions", "max_position_embeddings"},
                                                                 {"model.max_positions", "n_positions"},
                                                                 {"model.experts", "num_experts"},
                                                                 {"model.experts", "num_local_experts"},
                                                                 {"model.experts", "n_routed_experts"},
                                                                 {"model.top_k", "num_experts_per_tok"},
                                                                 {"model.moe_ffn", "moe_intermediate_size"},
                                                                 {"model.moe_every", "decoder_sparse_step"},
                                                                 {"model.dense_layers", "first_k_dense_replace"},
                                                                 {"model.window", "sliding_window"},
                                                                 {"model.global_layers", "max_window_layers"},
                                                                 {"model.global_every", "sliding_window_pattern"},
                                                                 {"model.local_rope_theta", "rope_local_base_freq"},
                                                                 {"model.kv_lora_rank", "kv_lora_rank"},
                                                                 {"model.q_lora_rank", "q_lora_rank"},
                                                                 {"model.qk_nope_head_dim", "qk_nope_head_dim"},
                                                                 {"model.qk_rope_head_dim", "qk_rope_head_dim"},
                                                                 {"model.v_head_dim", "v_head_dim"}};
  const auto goes_on = [](char c) { return (c >= 'a' && c <= 'z') || c == '_'; };
  for (const auto& [key, word] : kWords) {
    if (!json.contains(word)) continue;
    for (size_t at = 0; (at = message.find(key, at)) != std::string::npos;) {
      if (const size_t end = at + key.size(); end < message.size() && goes_on(message[end]))
        at = end;
      else
        message.replace(at, key.size(), word);
    }
  }
  return message;
}

/// Transformers 5 has keys of rotary embeddings under `rope_parameters`, of all layers or by kind of layer: these, where the older ones are
/// not there.
Json with_rope_parameters(Json json) {
  if (!json.contains("rope_parameters") || !json["rope_parameters"].is_object()) return json;
  for (const auto& [kind, key] : {std::pair{"full_attention", "rope_theta"}, {"sliding_attention", "rope_local_base_freq"}}) {
    const Json& all = json["rope_parameters"];
    if (all.contains(kind) && all[kind].is_object() && all[kind].contains("rope_theta") && !json.contains(key))
      json[key] = Json(all[kind]["rope_theta"]);
  }
  for (const char* key : {"rope_theta", "partial_rotary_factor"})
    if (json["rope_parameters"].contains(key) && (!json.contains(key) || json[key].is_null()))
      json[key] = Json(json["rope_parameters"][key]);
  return json;
}

/// The kind of scaling of rotary frequencies, of all layers or of some; empty: none.
std::string rotary_scaling_of(const Json& json) {
  const auto kind_of = [](const Json& parameters) -> std::string {
    for (const char* key : {"rope_type", "type"})
      if (parameters.contains(key) && parameters[key] != "default") return shown(parameters[key]);
    return "";
  };
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    if (!json.contains(key) || !json[key].is_object()) continue;
    if (std::string kind = kind_of(json[key]); !kind.empty()) return kind;
    for (const Json& of_layers : json[key])
      if (of_layers.is_object())
        if (std::string kind = kind_of(of_layers); !kind.empty()) return kind;
  }
  return "";
}

}  // namespace

Result<ModelConfig> parse_model_config(std::string_view text, const std::string& name, const std::string& assume) {
  const auto refusal = [&](std::string message, std::string hint) {
    return Error{ExitCode::kUsage, std::move(message), std::move(hint), name};
  };
  std::string beyond;
  const Json file = parse_json(text, beyond);
  if (!beyond.empty()) return refusal(beyond, "a Hugging Face config.json is expected");
  if (!file.is_object()) {
    const JsonFault fault = json_fault(text);
    return Error{ExitCode::kUsage, fault.message, "a JSON object, {...}, is expected: the config.json of a Hugging Face model",
                 name + fault.place};
  }
  const bool nested = file.contains("text_config") && file["text_config"].is_object();
  const Json json = with_rope_parameters(nested ? file["text_config"] : file);
  const auto reader_of = [](const std::string& type) {
    return std::ranges::find(kReaders, type, &std::pair<std::string_view, Reader>::first);
  };
  ModelConfig config;
  config.model.name = name;
  ConfigReader head(json, name, false);
  config.type = head.text_or("model_type", "");
  if (!assume.empty() && reader_of(assume) == std::end(kReaders))
    return refusal(fmt::format("read as `{}`, which is not a model_type that is known", assume),
                   fmt::format("implemented: {}", fmt::join(model_types(), " ")));
  const bool assumed = reader_of(config.type) == std::end(kReaders) && !assume.empty();
  const auto reader = reader_of(assumed ? assume : config.type);
  if (reader == std::end(kReaders))
    return refusal(
        config.type.empty() ? "`model_type` is missing" : fmt::format("`model_type` \"{}\" is not implemented", config.type),
        fmt::format("{}implemented: {}; another model can be estimated, not executed, as one of these: add `--assume llama`, and "
                    "`--set model.KEY=VALUE` for each size that differs",
                    config.type.empty() ? "add it, for example \"model_type\": \"llama\"; " : "", fmt::join(model_types(), " ")));
  ConfigReader in(json, name, assumed);
  reader->second(in, config);
  config.model.init_deviation = in.number_or("initializer_range", 0.02f);
  config.rotary_scaling = rotary_scaling_of(json);
  if (head.error()) return *head.error();
  if (in.error()) return *in.error();
  if (config.unexecuted.empty()) config.unexecuted = in.irregular();
  if (assumed) config.unexecuted = fmt::format("it is read as if it were a {}", assume);
  Model sizes = config.model;
  if (config.rotary) sizes.max_positions = std::max<int64_t>(1, sizes.max_positions);  // no table
  if (assumed) return config;  // what it lacks is given later, and refused where it is used
  if (const auto checked = check(sizes); !checked.ok())
    return refusal(in_words_of(json, checked.error().message), in_words_of(json, checked.error().hint));
  if (const auto checked = check_sizes(config); !checked.ok()) return refusal(checked.error().message, checked.error().hint);
  return config;
}

namespace {

Result<Model> executed(Result<ModelConfig> config) {
  if (!config.ok()) return config.error();
  if (config->unexecuted.empty()) return std::move(config->model);
  return Error{ExitCode::kUsage,
               fmt::format("{} is not executed: {}", config->model.name, config->unexecuted),
               "it is predicted as a framework runs it: `shardlab memory --profile megatron`",
               {}};
}

}  // namespace

Result<Model> parse_model(std::string_view text, const std::string& name) { return executed(parse_model_config(text, name)); }
Result<Model> load_model(const std::string& name_or_path) { return executed(load_model_config(name_or_path)); }

namespace {

bool is_folder(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::is_directory(path, ignored);
}

/// "meta-llama/Llama-3.1-8B": as models are named where they are published.
bool is_published_name(const std::string& text) {
  return std::ranges::count(text, '/') == 1 && !text.starts_with('/') && !text.starts_with('.') && !text.ends_with('/') &&
         !text.ends_with(".json");
}

Result<ModelConfig> read_config_file(const std::string& path, const std::string& assume) {
  auto text = read_file_within(path, limits::kModelFileBytes);
  if (!text.ok()) return text.error();
  auto model = parse_model_config(*text, path, assume);
  if (!model.ok()) return model.error();
  // A config.json is named by its folder, as on the hub.
  const std::filesystem::path file(path);
  const std::string folder = file.parent_path().filename().string();
  const bool in_folder = file.filename() == "config.json" && !folder.empty() && folder != "." && folder != "..";
  model->model.name = in_folder ? folder : file.extension() == ".json" ? file.stem().string() : file.filename().string();
  return model;
}

}  // namespace

bool is_model_path(const std::string& text, const std::string& folder) {
  const std::string path = (std::filesystem::path(folder) / text).string();
  if (is_published_name(text)) return is_there(path) || !name_meant(text.substr(text.find('/') + 1), list_models()).ok();
  if (text.find('/') != std::string::npos || text.ends_with(".json")) return true;
  return !name_meant(text, list_models()).ok() && is_folder(path) && is_there(path + "/config.json");
}

Result<ModelConfig> load_model_config(const std::string& name_or_path, const std::string& assume) {
  if (is_model_path(name_or_path, "")) {
    if (is_folder(name_or_path)) {
      const std::string file = (std::filesystem::path(name_or_path) / "config.json").lexically_normal().string();
      if (is_there(file)) return read_config_file(file, assume);
      return Error{ExitCode::kUsage, fmt::format("the folder {} has no config.json", name_or_path), "put the model's there", {}};
    }
    if (is_published_name(name_or_path) && !is_there(name_or_path))
      return Error{
          ExitCode::kUsage,
          fmt::format("`{}` is not a folder here, and no shipped model is called so", name_or_path),
          fmt::format("nothing is downloaded: put its config.json at {}/config.json; `shardlab model list` prints the names",
                      name_or_path),
          {}};
    return read_config_file(name_or_path, assume);
  }
  const size_t slash = name_or_path.find('/');
  const std::string said = slash == std::string::npos ? name_or_path : name_or_path.substr(slash + 1);
  const auto meant = name_meant(said, list_models());
  if (!meant.ok()) {
    Error error = meant.error();
    error.message = "no model is " + error.message;
    error.hint =
        "`shardlab model list` prints the names; a path to a config.json, or to its folder, is also a model (write ./NAME for a "
        "file without .json)";
    return error;
  }
  const auto read = [&] {
    return parse_model_config(std::ranges::find(model_presets(), *meant, &Preset::name)->text, *meant, assume);
  };
  if (!assume.empty()) return read();
  static OncePerName<ModelConfig> models;
  return models.of(*meant, read);
}

}  // namespace shardlab::sweeps
