// Every shipped model of the families that are only predicted: its parameters are those of the published checkpoint.
#include <set>

#include "cli/model_shape.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

TEST_CASE("parameters of the predicted families equal the published counts") {
  // Sums of the tensors of the published checkpoints, a tied head counted once; DeepSeek-V3 and Kimi K2 without the layers that
  // predict further tokens. Moonlight's file lists 15,960,111,936: 64 elements a layer that are no weight of a config key, beside
  // the buffers of rotary frequencies that files of this family carry.
  const std::pair<const char*, int64_t> published[] = {
      {"qwen2.5-0.5b", 494'032'768},        {"qwen2.5-1.5b", 1'543'714'304},
      {"qwen2.5-3b", 3'085'938'688},        {"qwen2.5-7b", 7'615'616'512},
      {"qwen2.5-14b", 14'770'033'664},      {"qwen2.5-32b", 32'763'876'352},
      {"qwen2.5-72b", 72'706'203'648},      {"qwen3-0.6b", 596'049'920},
      {"qwen3-1.7b", 1'720'574'976},        {"qwen3-4b", 4'022'468'096},
      {"qwen3-8b", 8'190'735'360},          {"qwen3-14b", 14'768'307'200},
      {"qwen3-32b", 32'762'123'264},        {"qwen3-30b-a3b", 30'532'122'624},
      {"qwen3-235b-a22b", 235'093'634'560}, {"mixtral-8x7b", 46'702'792'704},
      {"mixtral-8x22b", 140'630'071'296},   {"deepseek-v3", 671'026'419'200},
      {"kimi-k2", 1'026'408'232'448},       {"moonlight-16b-a3b", 15'960'111'936 - 27 * 64}};
  std::set<std::string> listed;
  for (const std::string& name : list_models())
    if (!load_model_config(name)->unexecuted.empty()) listed.insert(name);
  for (const auto& [name, count] : published) {
    INFO(name);
    CHECK(listed.erase(name) == 1);
    const auto config = load_model_config(name);
    REQUIRE(config.ok());
    CHECK(check(model_shape(*config)).ok());
    CHECK(parameter_count(model_shape(*config)) == count);
  }
  CHECK(listed.empty());  // every other shipped model is one that is executed
  CHECK(list_models().size() >= 40);
  // What one token passes: 12.9 of Mixtral's 46.7 billion.
  CHECK(active_parameter_count(model_shape(*load_model_config("mixtral-8x7b"))) == 12'879'925'248);
}

TEST_CASE("a model that is executed has the same shape both ways") {
  for (const std::string& name : list_models()) {
    const ModelConfig config = *load_model_config(name);
    if (!config.unexecuted.empty()) continue;
    INFO(name);
    CHECK(model_shape(config) == analytic::shape_of(config.model));
    CHECK(parameter_count(model_shape(config)) == parameter_count(config.model));
  }
}

}  // namespace
}  // namespace shardlab::testing
