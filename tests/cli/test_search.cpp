// The search verb: its contract, its answers beside those of other verbs, its refusals.
#include <map>
#include <nlohmann/json.hpp>

#include "reports/table.h"
#include "tests/cli/program.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

using testing::Output;
using testing::Scratch;
using testing::shardlab_program;
using testing::slurp;

/// What shardlab's own executor runs: its memory and wire bytes are exact.
constexpr const char* kExecuted =
    "--model tiny-llama --machine hgx-h100-ndr --devices 8 --global-batch-tokens 16Ki --seq-len 256 --precision fp32 --schedule "
    "none,1f1b --recompute none,full --offload none --cp 1 --sequence-parallel false --hybrid-shard 0 ";

std::map<std::string, std::string> first_row(const std::string& path) {
  const auto rows = parse_csv(slurp(path));
  REQUIRE(rows.size() > 1);
  std::map<std::string, std::string> row;
  for (size_t i = 0; i < rows[0].size(); ++i) row[rows[0][i]] = rows[1][i];
  return row;
}

TEST_CASE("search prints its contract as JSON, the best first, all within the device's memory") {
  const Scratch scratch;
  const Output o =
      shardlab_program(scratch, std::string("search --format json --top 4 --profile megatron --tokens 1T --device-hour-usd 2 ") +
                                    "--model llama-3.1-8b --machine hgx-h100-ndr --devices 16 --global-batch-tokens 1Mi "
                                    "--cp 1 --offload none --sequence-parallel true");
  INFO(o.err);
  REQUIRE(o.code == 0);
  const auto json = nlohmann::json::parse(o.out);
  for (const char* key : {"evaluated", "seconds", "layouts", "refused", "points", "pareto", "lost", "objective"})
    CHECK(json.contains(key));
  REQUIRE(json["layouts"].size() == 4);
  double before = 0;
  for (const auto& layout : json["layouts"]) {
    for (const char* key : {"dp",
                            "tp",
                            "pp",
                            "vpp",
                            "cp",
                            "ep",
                            "zero",
                            "schedule",
                            "sequence_parallel",
                            "recompute",
                            "offload",
                            "precision",
                            "micro_batch",
                            "grad_accumulation",
                            "seq_len",
                            "predicted_step_s",
                            "predicted_tokens_per_s",
                            "predicted_peak_bytes",
                            "predicted_reserved_bytes",
                            "predicted_mfu",
                            "predicted_days",
                            "predicted_usd"})
      CHECK(layout.contains(key));
    CHECK(layout["dp"].get<int>() * layout["tp"].get<int>() * layout["pp"].get<int>() * layout["cp"].get<int>() == 16);
    CHECK(layout["predicted_step_s"].get<double>() >= before);
    CHECK(layout["predicted_device_bytes"].get<int64_t>() <= 85'899'345'920);
    before = layout["predicted_step_s"].get<double>();
    const double hours = 1e12 / layout["predicted_tokens_per_s"].get<double>() / 3600;
    CHECK(layout["predicted_usd"].get<double>() == Approx(hours * 16 * 2));
    CHECK(layout["predicted_days"].get<double>() == Approx(hours / 24));
  }
  CHECK(json["refused"].contains("does not fit"));
  int64_t lost = 0;
  for (const auto& loser : json["lost"]) lost += loser["points"].get<int64_t>();
  CHECK(lost + 4 == json["points"].get<int64_t>());
}

TEST_CASE("the best layout goes on to run and memory, which say the same bytes") {
  const Scratch scratch;
  const Output o = shardlab_program(scratch, std::string("search ") + kExecuted + "--out " + (scratch / "found"));
  INFO(o.err);
  REQUIRE(o.code == 0);
  const auto row = first_row(scratch / "found/results.csv");
  CHECK(row.at("status") == "ok");
  CHECK(row.at("rank") == "1");
  CHECK(row.at("world_size") == "8");
  for (const char* file : {"pareto.csv", "lost.csv", "search.json", "best.yaml"})
    CHECK(!slurp(scratch / ("found/" + std::string(file))).empty());

  const Output run = shardlab_program(scratch, "run " + (scratch / "found/best.yaml") + " --out " + (scratch / "run"));
  INFO(run.err);
  REQUIRE(run.code == 0);
  const auto timeline = first_row(scratch / "run/results.csv");
  for (const char* column : {"predicted_peak_bytes", "predicted_wire_bytes", "dp", "tp", "pp", "zero", "schedule", "recompute",
                             "micro_batch", "grad_accumulation", "global_batch_tokens"})
    CHECK(timeline.at(column) == row.at(column));

  const std::string marker = "shardlab memory ";
  const size_t at = o.err.find(marker);
  REQUIRE(at != std::string::npos);
  const std::string words = o.err.substr(at + marker.size(), o.err.find('\n', at) - at - marker.size());
  const Output memory = shardlab_program(scratch, "memory --format json " + words);
  INFO(words << "\n" << memory.err);
  REQUIRE(memory.code == 0);
  CHECK(nlohmann::json::parse(memory.out)["peak"].get<int64_t>() == std::stoll(row.at("predicted_peak_bytes")));
}

TEST_CASE("results.csv of a search begins with the columns of every results.csv") {
  const Scratch scratch;
  REQUIRE(shardlab_program(scratch, std::string("search ") + kExecuted + "--out " + (scratch / "found")).code == 0);
  const std::string text = slurp(scratch / "found/results.csv");
  CHECK(text.starts_with(
      "case_id,name,status,reason,model,parameters,machine,backend,transport,world_size,dp,tp,pp,vpp,cp,ep,zero,"));
  CHECK(parse_csv(text)[0].back() == "pareto");
}

TEST_CASE("where nothing fits the answer is no, with what is missing") {
  const Scratch scratch;
  const Output o =
      shardlab_program(scratch,
                       "search --model llama-3.1-8b --machine hgx-h100-ndr --devices 1 --global-batch-tokens 64Ki --profile "
                       "megatron --offload none --zero 0");
  CHECK(o.code == 3);
  CHECK(o.out.find("does not fit") != std::string::npos);
  CHECK(o.out.find("nothing fits: the nearest needs") != std::string::npos);
}

TEST_CASE("a search for least memory takes less of it, one for cost fewer devices") {
  const Scratch scratch;
  const std::string words =
      "search --format json --top 1 --profile megatron --model llama-3.1-8b --machine hgx-h100-ndr --devices 8,64 "
      "--global-batch-tokens 512Ki --cp 1 --offload none ";
  const auto best = [&](const std::string& objective) {
    const Output o = shardlab_program(scratch, words + "--objective " + objective);
    REQUIRE(o.code == 0);
    return nlohmann::json::parse(o.out)["layouts"][0];
  };
  const auto time = best("time"), memory = best("memory"), cost = best("cost");
  CHECK(time["predicted_step_s"] < memory["predicted_step_s"]);
  CHECK(memory["predicted_device_bytes"] < time["predicted_device_bytes"]);
  CHECK(cost["predicted_device_s"] < time["predicted_device_s"]);
  CHECK(time["predicted_device_s"].get<double>() == Approx(64 * time["predicted_step_s"].get<double>()));
}

TEST_CASE("what makes no search is refused in words") {
  const Scratch scratch;
  const std::string good = "search --model tiny-llama --machine hgx-h100-ndr --devices 8 --global-batch-tokens 16Ki --seq-len 256 ";
  struct Bad {
    std::string words, says;
  };
  const std::vector<Bad> table{
      {good + "--objective speed", "time, memory or cost"},
      {good + "--schedule 2f2b", "breadth-first"},
      {good + "--zero 4", "zero 4"},
      {good + "--tp 0", "tp 0"},
      {good + "--tp nan", "no number"},
      {good + "--micro-batch 99999999999999999999", "no number"},
      {good + "--offload disk", "activations=nvme"},
      {good + "--precision fp7", "fp8"},
      {good + "--profile nobody", "nobody"},
      {good + "--tokens none", "--tokens none"},
      {good + "--format xml", "markdown"},
      {"search --model tiny-llama --machine hgx-h100-ndr --devices 0 --global-batch-tokens 16Ki", "devices 0"},
      {"search --model tiny-llama --machine hgx-h100-ndr --devices 8 --global-batch-tokens 1000 --seq-len 256", "768 and 1024 are"},
      {"search --model tiny-llama --machine hgx-h100-ndr --devices 8 --global-batch-tokens -1", "no size"}};
  for (const Bad& bad : table) {
    const Output o = shardlab_program(scratch, bad.words);
    INFO(bad.words << "\n" << o.err);
    CHECK(o.code == 2);
    CHECK(o.err.find(bad.says) != std::string::npos);
    CHECK(o.out.empty());
  }
}

}  // namespace
}  // namespace shardlab::testing
