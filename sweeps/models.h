// Model shapes by name or from a Hugging Face config.json.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "plan/base/result.h"
#include "plan/model.h"

namespace shardlab {

/// Names of the models that ship with the program (sweeps/models/*.json, compiled in), sorted.
std::vector<std::string> list_models();

/// A preset by name, or the config.json at a path (anything with a '/' or ending in ".json"). `model_type` gpt2, llama and mistral
/// are read; what changes the computation and is not implemented (biases in llama, other activations) is refused by key.
/// Not read, as they change no shape, flop or byte: dropout probabilities, rope_scaling, token ids. A sliding window is a limit on
/// seq_len, below which attention is full.
Result<Model> load_model(const std::string& name_or_path);

/// The same from text; `name` becomes Model::name and stands in messages.
Result<Model> parse_model(std::string_view json, const std::string& name);

}  // namespace shardlab
