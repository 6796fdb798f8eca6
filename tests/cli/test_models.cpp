// Every shipped model of the families that are only predicted: its parameters are those of the published checkpoint.
#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "answers/memory_question.h"
#include "answers/model_shape.h"
#include "answers/search_space.h"
#include "tests/cli/program.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

TEST_CASE("parameters of the predicted families equal the published counts") {
  // Sums of the tensors of the published checkpoints, a tied head counted once; DeepSeek-V3 and Kimi K2 without the layers that
  // predict further tokens. Moonlight's file lists 15,960,111,936: 64 elements a layer that are no weight of a config key, beside
  // the buffers of rotary frequencies that files of this family carry.
  // Gemma 3's files have the encoder of pictures besides (SigLIP: 27 layers of width 1152 and 4304, patches of 14 x 14 on 896 x
  // 896) and its projection to the model's width; GLM-4.5's the layer that predicts a further token, with tables of its own.
  const auto vision = [](int64_t hidden) {
    const int64_t layer = 4 * (1152 * 1152 + 1152) + 2 * 1152 * 4304 + 4304 + 1152 + 4 * 1152;
    return 27 * layer + (14 * 14 * 3 + 1) * 1152 + 64 * 64 * 1152 + 2 * 1152 + 1152 * hidden + 1152;
  };
  const std::pair<const char*, int64_t> published[] = {
      {"deepseek-v3", 671'026'419'200 - 58 * 256},  // less biases of routers, which are state
      {"deepseek-v2", 235'741'434'880},
      {"deepseek-v2-lite", 15'706'484'224},
      {"kimi-k2", 1'026'408'232'448 - 60 * 384},
      {"moonlight-16b-a3b", 15'960'111'936 - 27 * 64 - 26 * 64},
      {"gemma-2-2b", 2'614'341'888},
      {"gemma-2-9b", 9'241'705'984},
      {"gemma-2-27b", 27'227'128'320},
      {"gemma-3-1b", 999'885'952},
      {"gemma-3-4b", 4'300'079'472 - vision(2560)},
      {"gemma-3-12b", 12'187'325'040 - vision(3840)},
      {"gemma-3-27b", 27'432'406'640 - vision(5376)},
      {"olmo-2-1b", 1'484'916'736},
      {"olmo-2-7b", 7'298'617'344},
      {"olmo-2-13b", 13'716'198'400},
      {"olmo-2-32b", 32'234'279'936},
      {"glm-4-9b", 9'400'279'040},
      {"glm-4.5-air", 110'468'824'832 - 3'616'573'568},
      {"gpt-oss-20b", 20'914'757'184},
      {"gpt-oss-120b", 116'829'156'672},
      {"gpt-neox-20b", 20'554'567'680},
      {"pythia-160m", 162'322'944},
      {"pythia-1.4b", 1'414'647'808},
      {"pythia-6.9b", 6'857'302'016},
      {"pythia-12b", 11'846'072'320}};
  std::set<std::string> listed;
  for (const std::string& name : list_models())
    if (!load_model_config(name)->unexecuted.empty()) listed.insert(name);
  for (const auto& [name, count] : published) {
    INFO(name);
    listed.erase(name);
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

TEST_CASE("what windows hide is no work") {
  analytic::ModelShape s = model_shape(*load_model_config("gemma-2-9b"));
  CHECK(s.attention_share(4096) == 1);  // no sequence is longer than the window
  // Half of the layers see 4096 of 8192 tokens: 4096 * 8192 - 4096^2 / 2 of 8192^2 / 2 pairs, three quarters.
  CHECK(s.attention_share(8192) == Approx(0.5 + 0.5 * 0.75));
  const double windowed = model_flops_per_token(s, 8192);
  s.windowed_layers = 0;
  CHECK(model_flops_per_token(s, 8192) - windowed == Approx(3.0 * 42 * 16 * 512 * 8192 * 0.125));
}

TEST_CASE("every shipped model is searched, answered by memory and swept analytically under a framework's profile") {
  const Scratch scratch;
  std::string include;
  for (const std::string& name : list_models()) {
    INFO(name);
    const auto config = load_model_config(name);
    const int64_t positions = config->model.max_positions > 0 ? std::min<int64_t>(config->model.max_positions, 1024) : 1024;
    const std::string length = fmt::to_string(positions);
    SearchFlags flags;
    flags.model = name, flags.machine = "h100", flags.devices = "1024", flags.seq_len = length, flags.objective = "time";
    flags.global_batch_tokens = fmt::to_string(2048 * positions), flags.top = 1;
    flags.axes = {{"pp", "1"}, {"cp", "1"}, {"recompute", "full"}, {"sequence_parallel", "true"}};
    const auto task = search_task(flags);
    INFO((task.ok() ? "" : to_string(task.error())));
    REQUIRE(task.ok());
    CHECK(task->studies.front().prepared.profile().name == "megatron");  // nobody named a profile
    CHECK(task->parameters == parameter_count(model_shape(*config)));
    const auto found = search::search(task->studies, task->space, task->options, nullptr);
    CHECK(found.counts.evaluated > 0);
    CaseFlags asked;
    asked.model = name, asked.machine = "H100", asked.devices = 8;
    asked.layout = {{"seq_len", length}};
    const auto question = memory_question(asked);
    INFO((question.ok() ? "" : to_string(question.error())));
    REQUIRE(question.ok());
    CHECK(question->config.profile == "megatron");
    const auto answer = memory_answer(*question);
    REQUIRE(answer.ok());
    CHECK(answer->worst().device() > 0);
    include += fmt::format("  - {{name: {0}, model: {0}}}\n", name);
  }
  const std::string sweep = scratch.write(
      "all.yaml",
      "name: all\nmachine: h100\nresolution: analytic\nprofile: megatron\nseq_len: 128\nlayout: {schedule: none}\ninclude:\n" +
          include);
  const Output out = shardlab_program(scratch, fmt::format("run {} --out {} --format csv", sweep, scratch / "out"));
  INFO(out.err);
  CHECK(out.out.find("refused") == std::string::npos);
  const std::string results = slurp(scratch / "out/results.csv");
  CHECK(static_cast<size_t>(std::ranges::count(results, '\n')) == list_models().size() + 1);
  // A schedule that no case holds is estimated too.
  const std::string other =
      scratch.write("zb.yaml",
                    "name: zb\nmodel: mixtral-8x7b\nmachine: {preset: h100, nodes: 4}\nresolution: analytic\n"
                    "profile: megatron-zero-bubble\npp: 4\ngrad_accumulation: 8\nprecision: bf16\nseq_len: 4096\nzero: 1\nep: 8\n"
                    "axes: {schedule: [1f1b, zb-h1]}\n");
  const Output schedules = shardlab_program(scratch, fmt::format("run {} --out {} --format csv", other, scratch / "zb"));
  INFO(schedules.err);
  CHECK(schedules.out.find("schedule=zb-h1,ok") != std::string::npos);
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
