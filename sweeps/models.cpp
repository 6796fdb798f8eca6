#include "sweeps/models.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>

#include "plan/base/files.h"
#include "plan/base/limits.h"
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
  // The library parses without recursion, and prints and destroys with it: what is nested too deeply is not even built.
  const auto bounded = [&](int depth, Json::parse_event_t event, Json&) {
    const bool opens = event == Json::parse_event_t::object_start || event == Json::parse_event_t::array_start;
    if (!opens || depth < limits::kJsonDepth) return true;
    error = fmt::format("is nested more than {} levels deep", limits::kJsonDepth);
    return false;
  };
  Json json = Json::parse(text, bounded, /*allow_exceptions=*/false);
  return error.empty() ? json : Json(Json::value_t::discarded);
}

/// Reads keys of one config.json; the first thing wrong is kept.
class ConfigReader {
 public:
  static constexpr uint64_t kMostSize = uint64_t{1} << 48;

  ConfigReader(const Json& json, const std::string& name) : json_(json), name_(name) {}

  bool has(const char* key) const { return json_.contains(key) && !json_[key].is_null(); }

  int64_t size(const char* key) {
    if (!has(key)) {
      refuse(fmt::format("`{}` is missing", key), "a Hugging Face config.json of this model_type has it");
      return 0;
    }
    return size_or(key, 0);
  }
  int64_t size_or(const char* key, int64_t otherwise) {
    if (!has(key)) return otherwise;
    const Json& value = json_[key];
    if (!value.is_number_integer()) {
      refuse(fmt::format("`{}` is {}, not a whole number", key, shown(value)), "write a whole number");
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
      refuse(fmt::format("`{}` is \"{}\", which is not implemented", key, value),
             fmt::format("implemented: {}", fmt::join(values, " ")));
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

 private:
  const Json& json_;
  const std::string& name_;
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

void read_llama_sizes(ConfigReader& in, Model& m) {
  m.family = Family::kLlama;
  m.layers = in.size("num_hidden_layers");
  m.hidden = in.size("hidden_size");
  m.heads = in.size("num_attention_heads");
  m.kv_heads = in.size_or("num_key_value_heads", m.heads);
  m.head_dim = in.size_or("head_dim", m.heads > 0 ? m.hidden / m.heads : 0);
  if (!in.has("head_dim") && m.heads > 0 && m.hidden % m.heads != 0)
    in.refuse(fmt::format("hidden_size {} is not divisible by num_attention_heads {}", m.hidden, m.heads), "give head_dim");
  m.ffn = in.size("intermediate_size");
  m.vocab = in.size("vocab_size");
  m.max_positions = in.size_or("max_position_embeddings", 0);
  // Qwen states a window beside the switch that leaves it off.
  if (const int64_t window = in.size_or("sliding_window", 0); window > 0 && in.flag_or("use_sliding_window", true))
    m.max_positions = m.max_positions > 0 ? std::min(m.max_positions, window) : window;
  m.tied_embeddings = in.flag_or("tie_word_embeddings", false);
  m.norm_epsilon = in.number_or("rms_norm_eps", 1e-6f);
  m.rope_theta = in.number_or("rope_theta", 10000.0f);
  in.must_be("hidden_act", {"silu", "swish"});
}

void read_llama(ConfigReader& in, ModelConfig& c) {
  read_llama_sizes(in, c.model);
  in.must_be_off("attention_bias");
  in.must_be_off("mlp_bias");
}

void read_qwen2(ConfigReader& in, ModelConfig& c) {
  read_llama_sizes(in, c.model);
  in.must_be_off("use_sliding_window");
  c.qkv_biases = true;
  c.unexecuted = "its projections of q, k and v have biases";
}

void read_qwen3(ConfigReader& in, ModelConfig& c) {
  read_llama(in, c);
  in.must_be_off("use_sliding_window");
  c.qk_norm = true;
  c.unexecuted = "it has norms over the heads of q and k";
}

constexpr const char* kMixture = "its layers are mixtures of experts";

void read_mixtral(ConfigReader& in, ModelConfig& c) {
  read_llama(in, c);
  c.experts = in.size("num_local_experts"), c.top_k = in.size("num_experts_per_tok");
  c.moe_ffn = c.model.ffn;
  c.unexecuted = kMixture;
}

void read_qwen3_moe(ConfigReader& in, ModelConfig& c) {
  read_qwen3(in, c);
  c.experts = in.has("num_experts") ? in.size("num_experts") : in.size("num_local_experts");
  c.top_k = in.size("num_experts_per_tok");
  c.moe_ffn = in.size("moe_intermediate_size");
  if (const int64_t step = in.size_or("decoder_sparse_step", 1); step != 1)
    in.refuse(fmt::format("`decoder_sparse_step` is {}, which is not implemented", step), "implemented: 1");
  c.dense_layers = in.leading_layers("mlp_only_layers");
  c.unexecuted = kMixture;
}

void read_deepseek(ConfigReader& in, ModelConfig& c) {
  read_llama(in, c);
  c.experts = in.size("n_routed_experts"), c.top_k = in.size("num_experts_per_tok");
  c.moe_ffn = in.size("moe_intermediate_size");
  c.shared_experts = in.size_or("n_shared_experts", 0);
  c.dense_layers = in.size_or("first_k_dense_replace", 0);
  c.router_bias = true;
  c.q_rank = in.size_or("q_lora_rank", 0), c.kv_rank = in.size("kv_lora_rank");
  c.nope_dim = in.size("qk_nope_head_dim"), c.rope_dim = in.size("qk_rope_head_dim"), c.v_dim = in.size("v_head_dim");
  c.model.head_dim = c.nope_dim + c.rope_dim;
  c.model.kv_heads = c.model.heads;  // every head has k and v of its own, made from one latent
  if (const int64_t frequency = in.size_or("moe_layer_freq", 1); frequency != 1)
    in.refuse(fmt::format("`moe_layer_freq` is {}, which is not implemented", frequency), "implemented: 1");
  c.unexecuted = "its attention is latent and its layers are mixtures of experts";
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
  const bool mixture = c.unexecuted.find("experts") != std::string::npos;
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
    {"qwen3", read_qwen3},
    {"mixtral", read_mixtral},
    {"qwen3_moe", read_qwen3_moe},
    {"deepseek_v3", read_deepseek},
    {"kimi_k2", read_deepseek}};

}  // namespace

std::vector<std::string> list_models() {
  std::vector<std::string> names;
  for (const Preset& preset : model_presets()) names.emplace_back(preset.name);
  return names;
}

Result<ModelConfig> parse_model_config(std::string_view text, const std::string& name) {
  const auto refusal = [&](std::string message, std::string hint) {
    return Error{ExitCode::kUsage, std::move(message), std::move(hint), name};
  };
  std::string beyond;
  const Json file = parse_json(text, beyond);
  if (!beyond.empty()) return refusal(beyond, "a Hugging Face config.json is expected");
  if (!file.is_object()) return refusal("is not a JSON object", "a Hugging Face config.json is expected");
  const bool nested = file.contains("text_config") && file["text_config"].is_object();
  const Json& json = nested ? file["text_config"] : file;
  ConfigReader in(json, name);
  ModelConfig config;
  config.model.name = name;
  const std::string type = in.text_or("model_type", "");
  const auto reader = std::ranges::find(kReaders, type, &std::pair<std::string_view, Reader>::first);
  if (reader == std::end(kReaders)) {
    std::string known;
    for (const auto& [word, read] : kReaders) known += fmt::format(" {}", word);
    return refusal(type.empty() ? "`model_type` is missing" : fmt::format("`model_type` \"{}\" is not implemented", type),
                   fmt::format("implemented:{}; describe other models with `inline`", known));
  }
  config.type = type;
  reader->second(in, config);
  config.model.init_deviation = in.number_or("initializer_range", 0.02f);
  if (in.error()) return *in.error();
  if (const auto checked = check(config.model); !checked.ok()) return refusal(checked.error().message, checked.error().hint);
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

Result<ModelConfig> load_model_config(const std::string& name_or_path) {
  if (name_or_path.find('/') != std::string::npos || name_or_path.ends_with(".json")) {
    auto text = read_file_within(name_or_path, limits::kModelFileBytes);
    if (!text.ok()) return text.error();
    auto model = parse_model_config(*text, name_or_path);
    if (!model.ok()) return model.error();
    // A config.json is named by its folder, as on the hub.
    std::string stem =
        name_or_path.substr(0, name_or_path.find_last_of('/') == std::string::npos ? 0 : name_or_path.find_last_of('/'));
    const std::string file = name_or_path.substr(stem.empty() ? 0 : stem.size() + 1);
    if (file == "config.json" && !stem.empty() && stem != "." && stem != "..")
      model->model.name = stem.substr(stem.find_last_of('/') + 1);
    else
      model->model.name = file.ends_with(".json") ? file.substr(0, file.size() - 5) : file;
    return model;
  }
  for (const Preset& preset : model_presets())
    if (preset.name == name_or_path) return parse_model_config(preset.text, name_or_path);
  const std::string close = nearest(name_or_path, list_models());
  return Error{
      ExitCode::kUsage,
      fmt::format("no model is named `{}`{}", name_or_path, close.empty() ? "" : fmt::format(", did you mean `{}`?", close)),
      "`shardlab model list` prints the names; a path to a config.json is also a model (write ./NAME for a file without .json)",
      {}};
}

}  // namespace shardlab::sweeps
