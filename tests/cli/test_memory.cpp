// `shardlab memory` as its users meet it: what-if, several values, frameworks, models that are only predicted, refusals.
#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "plan/keys.h"
#include "reports/table.h"
#include "tests/cli/program.h"
#include "tests/namespaces.h"

namespace shardlab::testing {
namespace {

using testing::Output;
using testing::Scratch;
using testing::shardlab_program;

nlohmann::json json_of(const Scratch& scratch, const std::string& words, int code) {
  const Output output = shardlab_program(scratch, "memory " + words + " --format json");
  INFO(words << "\n" << output.err);
  REQUIRE(output.code == code);
  return nlohmann::json::parse(output.out);
}

/// What every answer keeps to, whoever's run it is.
void check_answer(const nlohmann::json& json) {
  for (const char* key : {"parameters", "devices", "layout", "stages", "peak", "capacity", "fits", "assumptions", "reserved",
                          "device", "interval", "verdict", "headroom", "changes"})
    REQUIRE(json.contains(key));
  int64_t peak = 0, device = 0;
  for (const auto& stage : json["stages"]) {
    int64_t parts = 0, live = 0, beyond = 0;
    for (const char* part : {"parameters", "gradients", "optimizer", "activations", "buffers", "workspace"})
      parts += stage[part].get<int64_t>();
    for (const auto& item : stage["items"])
      (item["group"] == "reserved" || item["group"] == "device" ? beyond : live) += item["bytes"].get<int64_t>();
    CHECK(parts == stage["peak"]);
    CHECK(live == stage["peak"]);
    CHECK(live + beyond == stage["device"]);
    CHECK(stage["reserved"] >= stage["peak"]);
    CHECK_FALSE(stage["moment"].get<std::string>().empty());
    peak = std::max(peak, stage["peak"].get<int64_t>()), device = std::max(device, stage["device"].get<int64_t>());
  }
  CHECK(json["peak"] == peak);
  CHECK(json["device"] == device);
  CHECK(json["headroom"] == json["capacity"].get<int64_t>() - device);
  CHECK(json["fits"] == (device <= json["capacity"].get<int64_t>()));
  CHECK(json["interval"]["device"]["low"] <= device);
  CHECK(json["interval"]["device"]["high"] >= device);
}

TEST_CASE("experts that do not lie on the ranks are refused by the rule that is broken, with what to set") {
  const Scratch scratch;
  const auto refused = [&](const std::string& layout) {
    return shardlab_program(scratch, "memory --model mixtral-8x7b --machine h100 --devices 8 " + layout).err;
  };
  CHECK(refused("--ep 3").find("ep 3 ranks do not share 8 experts evenly\n  set ep to a divisor of 8") != std::string::npos);
  CHECK(refused("--ep 8 --tp 2").find("set ep to a divisor of 4, or expert_tp: 1") != std::string::npos);
  CHECK(refused("--ep 4 --tp 2 --expert-tp 3").find("expert_tp 3 does not cut experts of width 14336 evenly") != std::string::npos);
  CHECK(refused("--ep 8 --pp 2").find("ep 8 times expert_tp 1 is 8 ranks for each copy of the experts, and dp 4 cp 1 tp 1 are 4") !=
        std::string::npos);
}

TEST_CASE("memory tells of shardlab's run to the byte, of a framework's with an interval, and what to change") {
  const Scratch scratch;
  const auto own =
      json_of(scratch, "--model gpt2 --machine a100-sxm4-80gb --devices 8 --pp 2 --seq-len 1024 --profile shardlab", 0);
  check_answer(own);
  CHECK(own["exact"] == true);
  CHECK(own["interval"]["live"]["low"] == own["interval"]["live"]["high"]);
  CHECK(own["changes"].empty());

  const std::string words = "--model llama-3-8b --machine hgx-h100-ndr --devices 8 --micro-batch 2 --profile megatron";
  const auto framework = json_of(scratch, words, 3);
  check_answer(framework);
  CHECK(framework["exact"] == false);
  CHECK(framework["profile"] == "megatron");
  CHECK(framework["layout"]["precision"] == "bf16");
  CHECK(framework["interval"]["live"]["low"] < framework["interval"]["live"]["high"]);
  REQUIRE_FALSE(framework["changes"].empty());
  // What is proposed does fit, asked again in its own words.
  std::string changed = words;
  for (const auto& [key, value] : framework["changes"][0]["set"].items())
    changed += key == "dp" ? "" : fmt::format(" --{} {}", key, value.get<std::string>());
  CHECK(json_of(scratch, changed, 0)["fits"] == true);
}

TEST_CASE(
    "nobody names a profile or a precision: a framework's run in bf16 on a described machine, and fp32 is the first thing to "
    "leave") {
  const Scratch scratch;
  const std::string words = "--model llama-3.2-3b --machine H100 --devices 8 --zero 1 --seq-len 4096";
  const auto json = json_of(scratch, words, 0);
  CHECK(json["profile"] == "megatron");
  CHECK(json["layout"]["precision"] == "bf16");
  CHECK(json["assumptions"].dump().find("no --profile: megatron") != std::string::npos);
  const Output page = shardlab_program(scratch, "memory " + words);
  CHECK(page.out.find("dp8 zero1 bf16") != std::string::npos);
  const auto wide = json_of(
      scratch, "--model llama-3.1-8b --machine H100 --devices 8 --zero 2 --micro-batch 2 --seq-len 8192 --precision fp32", 3);
  bool proposed = false;
  for (const auto& change : wide["changes"])
    proposed |= change["set"].contains("precision") && change["set"]["precision"] == "bf16";
  CHECK(proposed);
  // A device alone has no network that a framework's step could be timed by: the bytes of our own executor need none.
  const auto own = json_of(scratch, "--model gpt2 --machine a100-sxm4-80gb --devices 8 --seq-len 1024", 0);
  CHECK(own["profile"] == "shardlab");
  CHECK(own["layout"]["precision"] == "bf16");
  CHECK(own["assumptions"].dump().find("no --profile: our own executor") != std::string::npos);
}

TEST_CASE("where changes cannot be ranked, what the machine lacks is named") {
  const Scratch scratch;
  const std::string words = "memory --model llama-3.1-70b --machine h100-sxm5-80gb --devices 8";
  const testing::Output lacking = testing::shardlab_program(scratch, words);
  INFO(lacking.out << lacking.err);
  CHECK(lacking.code == 3);
  CHECK(lacking.out.find("what to change is not ranked: machine `h100-sxm5-80gb` has 8 nodes of 1 device, and no network "
                         "bandwidth says how they are joined; set machine.inter_bandwidth") != std::string::npos);
  const testing::Output given = testing::shardlab_program(scratch, words + " --set machine.inter_bandwidth=50G");
  CHECK(given.out.find("not ranked") == std::string::npos);
}

TEST_CASE("what if prints both and the difference, several values a row each") {
  const Scratch scratch;
  const std::string base = "--model llama-3-8b --machine hgx-h100-ndr --devices 8 --profile megatron";
  const auto json = json_of(scratch, base + " --what-if zero=3,recompute=full", 0);
  check_answer(json["what_if"]);
  CHECK(json["layout"]["zero"] == 0);
  CHECK(json["what_if"]["layout"]["zero"] == 3);
  CHECK(json["what_if"]["layout"]["recompute"] == "full");
  int64_t before = 0, after = 0;
  for (const auto& line : json["difference"]) before += line["before"].get<int64_t>(), after += line["after"].get<int64_t>();
  CHECK(before == json["device"]);
  CHECK(after == json["what_if"]["device"]);
  const auto offload = json_of(scratch, base + " --what-if offload=optimizer=cpu,activations=cpu,zero=1", 0);
  CHECK(offload["what_if"]["layout"]["offload"] == "activations=cpu,optimizer=cpu");
  CHECK(offload["what_if"]["layout"]["zero"] == 1);
  CHECK(offload["what_if"]["stages"][0]["host"] > 0);

  const auto table = json_of(scratch, base + " --zero 0,1,2,3 --micro-batch 1,2", 0);
  REQUIRE(table["variants"].size() == 8);
  CHECK(table["variants"][1]["set"]["zero"] == "0");
  CHECK(table["variants"][1]["set"]["micro_batch"] == "2");
  for (const auto& variant : table["variants"]) check_answer(variant);
  CHECK(table["variants"][0]["peak"] > table["variants"][6]["peak"]);
  const Output refused = shardlab_program(scratch, "memory " + base + " --tp 1,3,8 --dp 1 --devices 0");
  CHECK(refused.code == 2);  // no machine has no devices
  const Output some =
      shardlab_program(scratch, "memory --model llama-3-8b --machine hgx-h100-ndr --profile megatron --tp 1,3,8 --zero 3");
  CHECK(some.code == 0);
  CHECK(some.out.find("refused") != std::string::npos);
  CHECK(some.out.find("cannot be cut by tp 3") != std::string::npos);  // why, and not only that
}

TEST_CASE("a page says which step it speaks of, in words that sum up, and why it has no step time") {
  const Scratch scratch;
  const std::string words = "memory --model llama-3-8b --machine hgx-h100-ndr --devices 8 --micro-batch 2";
  const Output page = shardlab_program(scratch, words);
  INFO(page.out << page.err);
  CHECK(page.out.find("a step is 65536 tokens: 8 data-parallel ranks, each 1 micro-batch (--grad-accumulation) of 2 sequences") !=
        std::string::npos);
  CHECK(page.out.find("needs = allocator holds + driver and NCCL") != std::string::npos);
  CHECK(page.out.find("zero 0: every rank keeps the whole optimizer state; --zero 1") != std::string::npos);
  CHECK(shardlab_program(scratch, words + " --zero 1").out.find("zero 0: every rank") == std::string::npos);
  const Output rows =
      shardlab_program(scratch, "memory --model gpt2 --machine a100-sxm4-80gb --devices 8 --zero 0,1 --tokens 300G");
  INFO(rows.out << rows.err);
  CHECK(rows.out.find("no step time, and so no days and no price: machine `a100-sxm4-80gb`") != std::string::npos);
  CHECK(rows.out.find("tokens/s") == std::string::npos);  // a column that nothing is in
}

TEST_CASE("packing adds less to the live peak than memory assumes where it does not lower the plan") {
  const Scratch scratch;
  for (const char* words :
       {"--model tiny-llama --machine a100-sxm4-80gb --devices 1 --seq-len 128",
        "--model tiny-gpt --machine a100-sxm4-80gb --devices 4 --pp 2 --grad-accumulation 4 --seq-len 128",
        "--model gpt2 --machine a100-sxm4-80gb --devices 8 --zero 3 --seq-len 512",
        "--model smollm-1.7b --machine hgx-h100-ndr --devices 8 --tp 2 --pp 2 --grad-accumulation 2 --seq-len 256"}) {
    const auto json = json_of(scratch, std::string(words) + " --profile shardlab --plan", 0);
    for (const auto& stage : json["stages"]) {
      INFO(words << ", stage " << stage["stage"]);
      CHECK(stage["reserved"].get<double>() <= 1.05 * stage["peak"].get<double>());
    }
  }
}

TEST_CASE("memory of adapters and of frozen weights") {
  const Scratch scratch;
  const std::string words = "--model llama-3.1-8b --machine H100 --devices 1 --micro-batch 1 --seq-len 4Ki ";
  const auto whole = json_of(scratch, words, 3), lora = json_of(scratch, words + "--lora-rank 16", 0);
  check_answer(lora);
  CHECK(whole["trained_parameters"] == whole["parameters"]);
  CHECK(lora["trained_parameters"] == 41'943'040);
  CHECK(lora["parameters"] == whole["parameters"]);
  const auto of = [](const nlohmann::json& json, const char* part) { return json["stages"][0][part].get<int64_t>(); };
  CHECK(of(lora, "gradients") == 4 * 41'943'040);
  CHECK(of(lora, "optimizer") == 12 * 41'943'040);
  CHECK(of(lora, "parameters") == of(whole, "parameters") + 2 * 41'943'040);
  const auto few = json_of(scratch, words + "--lora-rank 16 --lora-targets q,v --frozen-bits 4", 0);
  CHECK(few["trained_parameters"] == 32 * 16 * (4096 + 4096 + 4096 + 1024));
  CHECK(of(few, "parameters") < of(lora, "parameters") / 2);
  const auto ends = json_of(scratch, words + "--frozen embedding,head", 3);
  CHECK(ends["trained_parameters"] == whole["parameters"].get<int64_t>() - 2 * int64_t{128256} * 4096 - 4096);

  const auto refused = [&](const std::string& more, std::string_view reason, const std::string& model = "llama-3.1-8b") {
    const Output output =
        shardlab_program(scratch, "memory --machine H100 --devices 8 --micro-batch 1 --model " + model + " " + more);
    INFO(more << "\n" << output.err);
    CHECK(output.code == 2);
    CHECK(output.err.find(reason) != std::string::npos);
  };
  refused("--frozen all", "frozen=all: nothing is trained");
  refused("--frozen all,none --lora-targets q", "lora_targets=q without lora_rank");
  refused("--frozen embedding,attention,mlp,norms", "only the head is trained");
  refused("--frozen-bits 4", "frozen_bits=4 without frozen projections");
  refused("--lora-rank 8 --lora-targets qkv", "there is no qkv");
  refused("--lora-rank 8 --frozen-bits 5", "weights are not kept in 5 bits");
  refused("--lora-rank 8 --profile shardlab", "lora_rank=8 is not implemented");
  refused("--lora-rank 8", "adapters of latent attention are not told", "deepseek-v3");
}

TEST_CASE("a sweep of ranks of adapters is estimated") {
  const Scratch scratch;
  const std::string file =
      scratch.write("lora.yaml",
                    "version: 1\nname: lora\nmode: simulate\nresolution: analytic\nmodel: llama-3.1-8b\n"
                    "machine: {preset: hgx-h100-ndr, nodes: 1}\nprofile: megatron\nlayout: {dp: 1}\n"
                    "train: {seq_len: 4096, precision: bf16, micro_batch: 1}\n"
                    "axes:\n  lora_rank: [8, 16, 64]\n  lora_targets: [all, attention, \"q,v\"]\n  frozen_bits: [4, 16]\n");
  const Output output = shardlab_program(scratch, "run " + file + " --out " + scratch / "lora");
  INFO(output.out << output.err);
  REQUIRE(output.code == 0);
  CHECK(output.out.find("18 cases: 18 ok.") != std::string::npos);
  // Utilisation counts the flops that such a step needs, a third less than the model's: with those it would be above 0.6.
  const auto rows = parse_csv(slurp(scratch / "lora/results.csv"));
  const auto column = std::ranges::find(rows[0], "predicted_mfu") - rows[0].begin();
  REQUIRE(rows.size() == 19);
  for (size_t i = 1; i < rows.size(); ++i) {
    const double mfu = std::stod(rows[i][static_cast<size_t>(column)]);
    CHECK(mfu > 0.35);
    CHECK(mfu < 0.6);
  }
}

TEST_CASE("memory of models that are only predicted") {
  const Scratch scratch;
  const auto v3 = json_of(scratch,
                          "--model deepseek-v3 --machine hgx-h100-ndr --devices 2048 --pp 16 --ep 64 --zero 1 --profile megatron "
                          "--set profile=megatron --seq-len 4096 --grad-accumulation 32 --recompute full",
                          0);
  check_answer(v3);
  CHECK(v3["parameters"] == 671'026'404'352);
  CHECK(v3["stages"].size() == 16);
  const Output own = shardlab_program(scratch, "memory --model glm-4.5-air --machine hgx-h100-ndr --devices 8 --profile shardlab");
  CHECK(own.code == 2);
  CHECK(own.err.find("is not executed: its layers are mixtures of experts") != std::string::npos);
  CHECK(own.err.find("--profile") != std::string::npos);
  // A point of a sweep that names one is refused the same way, before anything runs.
  const std::string sweep = scratch.write("moe.yaml", "mode: simulate\nmodel: glm-4.5-air\nmachine: hgx-h100-ndr\n");
  const Output run = shardlab_program(scratch, "run " + sweep + " --dry-run");
  CHECK(run.code == 3);
  CHECK(run.out.find("glm-4.5-air is not executed: its layers are mixtures of experts") != std::string::npos);
}

TEST_CASE("model list and show tell what is executed and what is only predicted") {
  const Scratch scratch;
  const Output list = shardlab_program(scratch, "model list --format json");
  REQUIRE(list.code == 0);
  size_t executed = 0, predicted = 0;
  int64_t of_glm = 0;
  for (const auto& row : nlohmann::json::parse(list.out)) {
    ++(row["executed"] == true ? executed : predicted);
    if (row["name"] == "glm-4.5-air") of_glm = row["parameters"];
    if (row["name"] != "deepseek-v3") continue;
    CHECK(row["family"] == "llama");
    CHECK(row["parameters"] == 671'026'404'352);
    CHECK(row["experts"] == 256);
    CHECK(row["executed"] == true);
  }
  CHECK(executed >= 20);
  CHECK(predicted >= 20);
  // The parts of a predicted model add up to it.
  const Output show = shardlab_program(scratch, "model show glm-4.5-air --format json");
  REQUIRE(show.code == 0);
  int64_t all = 0;
  for (const auto& row : nlohmann::json::parse(show.out)) all += row["count"].get<int64_t>() * row["elements"].get<int64_t>();
  CHECK(all == of_glm);
  CHECK(shardlab_program(scratch, "model show olmo-2-7b").out.find("predicted, not executed: its norms") != std::string::npos);
  const std::string huge = scratch.write("huge.json", R"({"model_type": "mixtral", "hidden_size": 2147483647,
      "num_hidden_layers": 2147483647, "num_attention_heads": 1, "head_dim": 2147483646, "intermediate_size": 2147483647,
      "vocab_size": 2147483647, "num_local_experts": 2147483647, "num_experts_per_tok": 2})");
  CHECK(shardlab_program(scratch, "model show " + huge).code == 2);
}

TEST_CASE("memory of shardlab's run answers or refuses each word of every flag, and needs no closed form") {
  const Scratch scratch;
  const std::string base =
      "memory --model qwen3-30b-a3b --set model.layers=4 --machine hgx-h100-ndr --seq-len 64 --precision fp32 --profile shardlab ";
  // Ranks and micro-batches without which a technique shares nothing out.
  const std::map<std::string_view, std::string> beside = {{"expert_overlap", "--dp 2 --ep 2 --grad-accumulation 2 "},
                                                          {"expert_bound", "--dp 4 --ep 4 --micro-batch 2 "},
                                                          {"schedule", "--pp 2 --grad-accumulation 4 "},
                                                          {"vpp", "--pp 2 --grad-accumulation 2 --schedule interleaved "},
                                                          {"sequence_parallel", "--tp 2 "},
                                                          {"tensor_overlap", "--tp 2 --sequence-parallel true "},
                                                          {"cp_kind", "--cp 2 "},
                                                          {"offload", "--dp 2 --zero 3 "}};
  std::set<std::string_view> answered, refused;
  for (const CaseKey& key : case_keys()) {
    if (key.has_flag == Flag::kNone) continue;
    std::vector<std::string> values = words_of(key);
    for (const char* value : {"1", "2", "true", "false"}) values.emplace_back(value);
    const auto layout = beside.find(key.word());
    for (const std::string& value : values) {
      if (!has_form(key, value)) continue;
      const std::string flag = fmt::format("{}--{}={}", layout == beside.end() ? "" : layout->second, key.word(), value);
      const Output output = shardlab_program(scratch, base + flag);
      INFO(flag << "\n" << output.err);
      CHECK((output.code == 0 || output.code == 1 || output.code == 2));
      CHECK(output.err.find("no closed form") == std::string::npos);
      (output.code == 2 ? refused : answered).insert(key.word());
    }
  }
  for (const auto& [word, layout] : beside) {
    INFO(word);
    CHECK(answered.contains(word));
  }
}

TEST_CASE("memory refuses what it cannot tell, with the reason") {
  const Scratch scratch;
  const std::string base = "memory --model llama-3-8b --machine hgx-h100-ndr --devices 8 ";
  for (const char* words : {"--profile nobody",
                            "--profile megatron --tp 3",
                            "--profile megatron --schedule zb-h1",
                            "--profile megatron --vpp 0",
                            "--profile megatron --seq-len 99999999999999999999",
                            "--profile megatron --micro-batch 0",
                            "--profile megatron --seq-len nan",
                            "--profile megatron --micro-batch 1000000000 --grad-accumulation 1000000000",
                            "--profile megatron --set diloco.steps=4",
                            "--profile megatron --set canonical=true",
                            "--profile megatron --recompute some+thing",
                            "--what-if zero",
                            "--what-if =3",
                            "--what-if zero=",
                            "--what-if zero=9",
                            "--zero 0,,1",
                            "--zero 0,1 --what-if zero=2",
                            "--profile shardlab --cp 2",
                            "--profile megatron --zero 2 --pp 2",
                            "--profile megatron --micro-batch 1,2,3,4,5,6,7,8,9 --seq-len 1,2,3,4,5,6,7,8,9 --tp 1,2,3,4,5,6,7,8,9 "
                            "--pp 1,2,3,4,5,6,7,8,9"}) {
    const Output output = shardlab_program(scratch, base + words);
    INFO(words << "\n" << output.out << output.err);
    CHECK(output.code == 2);
    CHECK(output.out.empty());
    CHECK_FALSE(output.err.empty());
  }
}

TEST_CASE("a run's days and price have what failures cost, where failures are stated") {
  const Scratch scratch;
  const std::string base =
      "memory --model llama-3.1-8b --machine hgx-h100-ndr --devices 1024 --profile torchtitan --global-batch-tokens 8Mi --seq-len "
      "8Ki "
      "--tokens 1T --price 2 --format json ";
  const auto run_of = [&](const std::string& more) {
    const Output o = shardlab_program(scratch, base + more);
    INFO(o.err);
    REQUIRE((o.code == 0 || o.code == 3));
    return nlohmann::json::parse(o.out).at("run");
  };
  const std::string failures = "--device-mtbf 50000h --checkpoint-time 40s --restart-time 10m";
  const auto without = run_of(""), with = run_of(failures), often = run_of(failures + " --checkpoint-every 1m");
  CHECK_FALSE(without.contains("goodput"));
  const double share = with["goodput"]["share"];
  CHECK(share > 0.9);
  CHECK(share < 1);
  for (const char* figure : {"days", "usd", "kwh", "usd_per_million_tokens", "kwh_per_million_tokens"})
    CHECK(with[figure].get<double>() * share == Approx(without[figure].get<double>()));
  CHECK(with["goodput"]["job_mtbf_s"].get<double>() == Approx(50000.0 * 3600 / 1024));
  CHECK(often["goodput"]["interval_s"] == 60);
  CHECK(often["goodput"]["share"].get<double>() < share);

  for (const char* words : {"--device-mtbf 50000h", "--checkpoint-time 40s --restart-time 1m", "--device-mtbf often"}) {
    const Output o = shardlab_program(scratch, base + words);
    INFO(words << o.err);
    CHECK(o.code == 2);
  }
  const Output bare = shardlab_program(scratch, base + " --device-mtbf 50000 --checkpoint-time 40s --restart-time 1m");
  CHECK(bare.code == 2);
  CHECK(bare.err.find("--device-mtbf 50000 has no unit") != std::string::npos);
  const Output untold = shardlab_program(scratch, "memory --model gpt2 --machine h100 --device-mtbf 50000h");
  CHECK(untold.code == 2);
  CHECK(untold.err.find("add --tokens") != std::string::npos);
}

}  // namespace
}  // namespace shardlab::testing
