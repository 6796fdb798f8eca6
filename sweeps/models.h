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

/// A config.json as it was read: what a `Model` holds, and what it does not.
struct ModelConfig {
  /// Sizes. Of mixtures and of latent attention those of a dense model with the same widths: `unexecuted` says what is missing.
  Model model;
  std::string type;        ///< `model_type` of the file
  std::string unexecuted;  ///< why no plan is made of it ("its layers are mixtures of experts"); empty where one is

  bool qkv_biases = false;  ///< of q, k and v alone (Qwen2)
  bool qk_norm = false;     ///< a norm over each head of q and k (Qwen3)

  /// Layers from `dense_layers` on have `experts` of width `moe_ffn`, `top_k` for a token, and `shared_experts` of the same width
  /// that every token passes; `router_bias`: a learned correction an expert. 0 experts: dense.
  int64_t experts = 0, top_k = 0, moe_ffn = 0, shared_experts = 0, dense_layers = 0;
  bool router_bias = false;

  /// Multi-head latent attention (DeepSeek-V2, section 2.1): ranks of the compressed q (0: not compressed) and kv, widths a head of
  /// q and k without rotation, of their rotary part, and of v. 0 kv_rank: plain attention.
  int64_t q_rank = 0, kv_rank = 0, nope_dim = 0, rope_dim = 0, v_dim = 0;
};

/// A preset by name, or the config.json at a path (anything with a '/' or ending in ".json"). `model_type` gpt2, llama, mistral,
/// qwen2, qwen3, mixtral, qwen3_moe and deepseek_v3 are read, the text part of a multimodal file as well; what changes the sizes
/// and is not known (biases in llama, other activations, dense layers between mixtures) is refused by key. Not read, as they change
/// no shape, flop or byte: dropout probabilities, rope_scaling, token ids, how experts are chosen; nor the layers that predict
/// further tokens (num_nextn_predict_layers), which published counts leave out. A sliding window is a limit on seq_len, below which
/// attention is full.
Result<ModelConfig> load_model_config(const std::string& name_or_path);

/// The same from text; `name` becomes Model::name and stands in messages.
Result<ModelConfig> parse_model_config(std::string_view json, const std::string& name);

/// The same for what is executed; the rest is refused with its reason.
Result<Model> load_model(const std::string& name_or_path);
Result<Model> parse_model(std::string_view json, const std::string& name);

}  // namespace shardlab::sweeps
