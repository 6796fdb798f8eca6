#include "sweeps/models.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>

#include "sweeps/presets.h"
#include "sweeps/yaml.h"

namespace shardlab {

namespace {

using Json = nlohmann::json;

/// Reads keys of one config.json; the first thing wrong is kept.
class ConfigReader {
 public:
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
    if (json_[key].is_number_integer()) return json_[key].get<int64_t>();
    refuse(fmt::format("`{}` is {}, not a whole number", key, json_[key].dump()), "write a whole number");
    return otherwise;
  }
  float number_or(const char* key, float otherwise) {
    if (!has(key)) return otherwise;
    if (json_[key].is_number()) return static_cast<float>(json_[key].get<double>());
    refuse(fmt::format("`{}` is {}, not a number", key, json_[key].dump()), "write a number");
    return otherwise;
  }
  bool flag_or(const char* key, bool otherwise) {
    if (!has(key)) return otherwise;
    if (json_[key].is_boolean()) return json_[key].get<bool>();
    refuse(fmt::format("`{}` is {}, not true or false", key, json_[key].dump()), "write true or false");
    return otherwise;
  }
  std::string text_or(const char* key, const std::string& otherwise) {
    if (!has(key)) return otherwise;
    if (json_[key].is_string()) return json_[key].get<std::string>();
    refuse(fmt::format("`{}` is {}, not a text", key, json_[key].dump()), "write a text in quotes");
    return otherwise;
  }
  /// The key must have one of these values; its absence means the first.
  void must_be(const char* key, std::initializer_list<const char*> values) {
    const std::string value = text_or(key, *values.begin());
    if (std::find(values.begin(), values.end(), value) == values.end())
      refuse(fmt::format("`{}` is \"{}\", which is not implemented", key, value),
             fmt::format("implemented: {}", fmt::join(values, " ")));
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

void read_llama(ConfigReader& in, Model& m) {
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
  if (const int64_t window = in.size_or("sliding_window", 0); window > 0)
    m.max_positions = m.max_positions > 0 ? std::min(m.max_positions, window) : window;
  m.tied_embeddings = in.flag_or("tie_word_embeddings", false);
  m.norm_epsilon = in.number_or("rms_norm_eps", 1e-6f);
  m.rope_theta = in.number_or("rope_theta", 10000.0f);
  in.must_be("hidden_act", {"silu", "swish"});
  in.must_be_off("attention_bias");
  in.must_be_off("mlp_bias");
}

}  // namespace

std::vector<std::string> list_models() {
  std::vector<std::string> names;
  for (const Preset& preset : model_presets()) names.emplace_back(preset.name);
  return names;
}

Result<Model> parse_model(std::string_view text, const std::string& name) {
  const auto refusal = [&](std::string message, std::string hint) {
    return Error{ExitCode::kUsage, std::move(message), std::move(hint), name};
  };
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return refusal("is not a JSON object", "a Hugging Face config.json is expected");
  ConfigReader in(json, name);
  Model model;
  model.name = name;
  const std::string type = in.text_or("model_type", "");
  if (type == "gpt2")
    read_gpt(in, model);
  else if (type == "llama" || type == "mistral")
    read_llama(in, model);
  else
    return refusal(type.empty() ? "`model_type` is missing" : fmt::format("`model_type` \"{}\" is not implemented", type),
                   "implemented: gpt2 llama mistral; describe other models with `inline`");
  model.init_deviation = in.number_or("initializer_range", 0.02f);
  if (in.error()) return *in.error();
  if (const auto checked = check(model); !checked.ok()) return refusal(checked.error().message, checked.error().hint);
  return model;
}

Result<Model> load_model(const std::string& name_or_path) {
  if (name_or_path.find('/') != std::string::npos || name_or_path.ends_with(".json")) {
    auto text = read_text_file(name_or_path);
    if (!text.ok()) return text.error();
    auto model = parse_model(*text, name_or_path);
    if (!model.ok()) return model.error();
    // A config.json is named by its folder, as on the hub.
    std::string stem =
        name_or_path.substr(0, name_or_path.find_last_of('/') == std::string::npos ? 0 : name_or_path.find_last_of('/'));
    const std::string file = name_or_path.substr(stem.empty() ? 0 : stem.size() + 1);
    if (file == "config.json" && !stem.empty() && stem != "." && stem != "..")
      model->name = stem.substr(stem.find_last_of('/') + 1);
    else
      model->name = file.ends_with(".json") ? file.substr(0, file.size() - 5) : file;
    return model;
  }
  for (const Preset& preset : model_presets())
    if (preset.name == name_or_path) return parse_model(preset.text, name_or_path);
  const std::string close = nearest(name_or_path, list_models());
  return Error{
      ExitCode::kUsage,
      fmt::format("no model is named `{}`{}", name_or_path, close.empty() ? "" : fmt::format(", did you mean `{}`?", close)),
      "`shardlab model list` prints the names; a path to a config.json is also a model (write ./NAME for a file without .json)",
      {}};
}

}  // namespace shardlab
