// Models by name or from a Hugging Face config.json: those that a case can hold, and those that are only predicted.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "plan/base/result.h"
#include "plan/model.h"

namespace shardlab::sweeps {

/// Names of the models that ship with the program (sweeps/models/*.json, compiled in), sorted.
std::vector<std::string> list_models();

/// A config.json as it was read: the fields of a `Model`, and fields that no `Model` has.
struct ModelConfig {
  /// Sizes. Where `unexecuted` says what is missing, the sizes of a dense model with the same widths.
  Model model;
  std::string type;        ///< `model_type` of the file
  std::string unexecuted;  ///< why no plan is made of it ("its layers are mixtures of experts"); empty where one is

  bool qkv_biases = false;     ///< of q, k and v alone (Qwen2)
  bool out_bias = false;       ///< of attention's output projection (gpt-oss)
  bool qk_norm = false;        ///< a norm over each head of q and k (Qwen3)
  bool qk_norm_whole = false;  ///< one norm over all heads of q together, and one over all heads of k (OLMo 2)
  bool post_norms = false;     ///< norms after attention and feed-forward, beside those before (Gemma 2)
  bool sinks = false;          ///< a learned logit a head that takes attention from the tokens (gpt-oss)
  bool rotary = false;         ///< of the gpt family: rotary positions in place of a learned table (GPT-NeoX)

  /// All but `dense_layers` of the layers have `experts` of width `moe_ffn`, `top_k` for a token, and `shared_experts` of the same width
  /// that every token passes; `router_bias`: a learned correction an expert. 0 experts: dense.
  int64_t experts = 0, top_k = 0, moe_ffn = 0, shared_experts = 0, dense_layers = 0;
  bool shared_gate = false;  ///< a vector of width `hidden` gates what the shared experts make of a token (Qwen2-MoE)
  bool router_bias = false;
  bool rotary_pairs = true;    ///< of latent attention: rotated rows of the weights lie in pairs (`rope_interleave`)
  std::string rotary_scaling;  ///< `rope_type` of frequencies that are scaled, which no plan does; empty: none are
  bool expert_biases = false;  ///< of the router and of each expert's projections (gpt-oss)

  /// Multi-head latent attention (DeepSeek-V2, section 2.1): ranks of the compressed q (0: not compressed) and kv, widths a head of
  /// q and k without rotation, of their rotary part, and of v. 0 kv_rank: plain attention.
  int64_t q_rank = 0, kv_rank = 0, nope_dim = 0, rope_dim = 0, v_dim = 0;
};

/// Why a mixture of experts is not executed, in words.
inline constexpr const char* kMixture = "its layers are mixtures of experts";

/// All that a config says beside Model, as one line: part of the id of a case.
std::string describe(const ModelConfig& config);

/// A preset by name, as people write it ("Llama-3.1-8B", "meta-llama/Llama-3.1-8B": sweeps/names.h); the config.json at a path
/// (anything with a '/' or ending in ".json"); or the one in a folder, which `org/name` is too. The `model_type`s of
/// `model_types()` are read, the text part of a multimodal file as well; what changes the sizes and is not known (biases in llama,
/// other activations, dense layers between mixtures) is refused by key. `rope_parameters`
/// (transformers 5) is read where it stands for older keys. Not read, as they change no shape, flop or byte: dropout
/// probabilities, rope_scaling (but for its kind, ModelConfig::rotary_scaling), token ids, how experts are chosen; nor the layers that predict further tokens
/// (num_nextn_predict_layers), which published counts leave out. A sliding window, of all layers or of those that
/// `layer_types`, `max_window_layers` or the family's pattern name, is Model::window. `assume`: the model_type that files of an unknown
/// one are read as, with the names that other files have for sizes. A size that such a file lacks is 0, for `--set model.KEY` to
/// give; what is missing is then refused where the model is used.
Result<ModelConfig> load_model_config(const std::string& name_or_path, const std::string& assume = "");

/// Whether `load_model_config` reads a file for this text, or a preset. Paths are relative to `folder`.
bool is_model_path(const std::string& text, const std::string& folder);

/// Every `model_type` that is read.
std::vector<std::string> model_types();

/// Reads the same file from text; `name` becomes Model::name and stands in messages.
Result<ModelConfig> parse_model_config(std::string_view json, const std::string& name, const std::string& assume = "");

/// A model that can be executed, by name or path. Refuses every other model with its reason.
Result<Model> load_model(const std::string& name_or_path);
Result<Model> parse_model(std::string_view json, const std::string& name);

}  // namespace shardlab::sweeps
