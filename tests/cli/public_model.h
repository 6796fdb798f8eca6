// A tiny model as transformers saves one: safetensors and config.json.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "interop/hugging_face.h"
#include "interop/safetensors.h"
#include "sweeps/models.h"
#include "tests/cli/program.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {

/// Writes a model with fixed weights, and `config` as its config.json, into the folder `public`, and returns that. `beside`: tensors of one
/// number that the file has besides.
inline std::string public_model_of(const Scratch& scratch, const Model& model, const std::string& config,
                                   const std::vector<std::string>& beside = {}) {
  fs::create_directories(scratch / "public");
  std::vector<std::pair<std::string, interop::StoredTensor>> entries;
  std::string data;
  const auto add = [&](const std::string& name, const std::vector<int64_t>& shape) {
    int64_t elements = 1;
    for (const int64_t extent : shape) elements *= extent;
    std::vector<float> values(static_cast<size_t>(elements));
    for (size_t i = 0; i < values.size(); ++i)
      values[i] = static_cast<float>((i * 2654435761u + entries.size()) % 1000) / 5000.0f - 0.1f;
    const auto begin = static_cast<int64_t>(data.size());
    data += interop::narrowed(values, interop::WeightType::kF32);
    entries.emplace_back(name, interop::StoredTensor{interop::WeightType::kF32, shape, begin, static_cast<int64_t>(data.size())});
  };
  for (const interop::ForeignTensor& t : interop::foreign_tensors(model)) add(t.name, t.shape);
  for (const std::string& name : beside) add(name, {1});
  scratch.write("public/model.safetensors", interop::safetensors_header(entries) + data);
  scratch.write("public/config.json", config);
  return scratch / "public";
}

/// The same of the shipped model `name`.
inline std::string public_model(const Scratch& scratch, const std::string& name) {
  const auto model = load_model(name);
  REQUIRE(model.ok());
  return public_model_of(scratch, *model, slurp(source_dir() + "/sweeps/models/" + name + ".json"));
}

}  // namespace shardlab::testing
