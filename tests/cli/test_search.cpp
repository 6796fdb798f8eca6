// The search verb: its contract, its answers beside those of other verbs, its refusals.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "answers/words.h"
#include "reports/format.h"
#include "reports/table.h"
#include "tests/cli/program.h"
#include "tests/namespaces.h"
#include "tests/reports/page.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

using testing::Output;
using testing::Scratch;
using testing::shardlab_program;
using testing::slurp;

/// What shardlab's own executor runs: its memory and wire bytes are exact.
constexpr const char* kExecuted =
    "--profile shardlab --model tiny-llama --machine hgx-h100-ndr --devices 8 --global-batch-tokens 16Ki --seq-len 256 --precision "
    "fp32 --schedule "
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
    CHECK(layout["step_low_s"].get<double>() < layout["predicted_step_s"].get<double>());
    CHECK(layout["step_high_s"].get<double>() > layout["predicted_step_s"].get<double>());
    CHECK(layout["equal_to_first"].is_boolean());
    CHECK(layout["predicted_device_bytes"].get<int64_t>() <= 85'899'345'920);
    before = layout["predicted_step_s"].get<double>();
    const double hours = 1e12 / layout["predicted_tokens_per_s"].get<double>() / 3600;
    CHECK(layout["predicted_usd"].get<double>() == Approx(hours * 16 * 2));
    CHECK(layout["predicted_days"].get<double>() == Approx(hours / 24));
  }
  CHECK(json["layouts"][0]["equal_to_first"] == true);
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
  CHECK(o.out.starts_with("Nothing fits. The smallest, dp1 "));
}

TEST_CASE("where no layout is possible, and where none is in time, the answer says which") {
  const Scratch scratch;
  const std::string search = "search --model llama-3.1-8b --machine hgx-h100-ndr --global-batch-tokens 4Mi ";
  const Output odd = shardlab_program(scratch, search + "--devices 63");
  CHECK(odd.code == 3);
  CHECK(odd.out.starts_with("No layout of 63 devices is possible; the table below says why. Take another number of --devices.\n"));
  const Output undivided = shardlab_program(scratch, search + "--devices 64 --tp 3");
  CHECK(undivided.code == 3);
  CHECK(undivided.out.starts_with("No layout: with tp 3 the degrees of parallelism have no product of 64."));
  CHECK(undivided.out.find("why others lost") == std::string::npos);
  const Output late = shardlab_program(scratch, search + "--devices 64 --tokens 1T --max-days 0.1");
  CHECK(late.code == 3);
  CHECK(late.out.starts_with("Nothing is in time. The fastest that fits, dp64 "));
  CHECK(late.out.find(">=: a lower bound; the layout was not estimated") != std::string::npos);
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

/// The question of somebody who plans a run, under a framework.
constexpr const char* kQuestion =
    "--model llama-3.1-70b --machine hgx-h100-ndr --devices 64 --global-batch-tokens 4Mi --seq-len 8Ki --tokens 1T ";

Output on_terminal(const Scratch& scratch, int columns, const std::string& words) {
  setenv("COLUMNS", std::to_string(columns).c_str(), 1);
  const Output o = shardlab_program(scratch, words);
  unsetenv("COLUMNS");
  return o;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

/// The words after a marker up to the end of its line.
std::string command_after(const std::string& text, const std::string& marker) {
  const size_t at = text.find(marker);
  INFO(text);
  REQUIRE(at != std::string::npos);
  return text.substr(at + marker.size(), text.find('\n', at) - at - marker.size());
}

TEST_CASE("one command says layout, step, MFU, memory, days and dollars on terminals of 80 and 120 columns") {
  const Scratch scratch;
  for (const int columns : {80, 120}) {
    const Output o = on_terminal(scratch, columns, std::string("search --profile megatron ") + kQuestion);
    INFO(o.out << o.err);
    REQUIRE(o.code == 0);
    CHECK(o.out.starts_with("Best: dp"));
    const std::string sentence = o.out.substr(0, o.out.find("\n\n"));
    for (const char* part : {" s a step", " % MFU", " GiB of 79.1 GiB", " days", "$", "Nine of ten runs like it take "}) {
      INFO(part);
      CHECK(sentence.find(part) != std::string::npos);
    }
    const std::vector<std::string> lines = lines_of(o.out);
    for (const std::string& line : lines) {
      INFO(line);
      CHECK(display_width(line) <= columns);
    }
    const auto head = std::ranges::find_if(lines, [](const std::string& l) { return l.find("tok/s/dev") != std::string::npos; });
    REQUIRE(head != lines.end());
    for (const char* column : {"#", "layout", "step", "MFU", "memory", "fits", "days", "cost"})
      CHECK(head->find(column) != std::string::npos);
    CHECK(o.out.find("not fit into") == std::string::npos);
    CHECK(o.out.find("lambda.ai/instances") != std::string::npos);  // where the price comes from
  }
}

TEST_CASE("the page of a search has ideal compute apart: it is the MFU's share of the step") {
  const Scratch scratch;
  const Output o =
      shardlab_program(scratch, std::string("search --profile megatron --html ") + (scratch / "page.html") + " " + kQuestion);
  INFO(o.err);
  REQUIRE(o.code == 0);
  const auto data = nlohmann::json::parse(data_of(slurp(scratch / "page.html")));
  const auto ideal = column_of(data, "predicted_part_ideal"), step = column_of(data, "predicted_step_s"),
             use = column_of(data, "predicted_mfu");
  REQUIRE(ideal.size() == data["count"].get<size_t>());
  REQUIRE(ideal.size() > 5);
  for (size_t i = 0; i < ideal.size(); ++i)
    CHECK(std::abs(ideal[i].get<double>() / step[i].get<double>() / use[i].get<double>() - 1) < 1e-9);
}

TEST_CASE("the ranking carries memory's verdict: what may not fit is below what does") {
  const Scratch scratch;
  const Output o = shardlab_program(scratch, std::string("search --format json --profile megatron --top 6 ") + kQuestion);
  REQUIRE(o.code == 0);
  const auto json = nlohmann::json::parse(o.out);
  REQUIRE(json["layouts"].size() == 6);
  bool tight = false;
  for (const auto& layout : json["layouts"]) {
    const bool fits = layout["predicted_verdict"] == "fits";
    CHECK((fits || layout["predicted_verdict"] == "tight"));
    CHECK_FALSE((tight && fits));
    tight = tight || !fits;
    if (fits) CHECK(layout["predicted_device_bytes"].get<double>() < 0.95 * 84'934'656'000.0);
  }
  CHECK(json["layouts"][0]["predicted_verdict"] == "fits");
  // The same layout has the same verdict when `memory` is asked.
  const std::string words = command_after(o.err, "shardlab memory ");
  const Output memory = shardlab_program(scratch, "memory --format json " + words);
  INFO(words << memory.err);
  REQUIRE(memory.code == 0);
  const auto told = nlohmann::json::parse(memory.out);
  CHECK(told["verdict"] == "fits");
  CHECK(told["device"] == json["layouts"][0]["predicted_device_bytes"]);
}

TEST_CASE("a fine-tune is searched for, and memory says the same of its layouts") {
  const Scratch scratch;
  const std::string model = "--model llama-3.1-8b --machine hgx-h100-ndr --devices 8 --global-batch-tokens 256Ki ";
  const auto searched = [&](const std::string& words) {
    const Output o = shardlab_program(scratch, "search --format json --profile megatron --top 3 " + model + words);
    INFO(words << o.err);
    REQUIRE(o.code == 0);
    return std::pair(nlohmann::json::parse(o.out)["layouts"], o.err);
  };
  const auto [whole, said_whole] = searched("");
  const auto [adapted, said] = searched("--lora-rank 16 --lora-targets q,v --frozen-bits 4");
  // Frozen weights have no gradients: a step is shorter.
  CHECK(adapted[0]["predicted_step_s"].get<double>() < whole[0]["predicted_step_s"].get<double>());
  const std::string words = command_after(said, "shardlab memory ");
  for (const char* flag : {"train.lora_rank=16", "train.lora_targets=q,v", "train.frozen_bits=4"})
    CHECK(words.find(flag) != std::string::npos);
  CHECK(command_after(said_whole, "shardlab memory ").find("lora") == std::string::npos);
  const Output memory = shardlab_program(scratch, "memory --format json " + words);
  INFO(words << memory.err);
  REQUIRE(memory.code == 0);
  const auto told = nlohmann::json::parse(memory.out);
  CHECK(told["trained_parameters"] == 32 * 16 * (4096 + 4096 + 4096 + 1024));
  CHECK(told["device"] == adapted[0]["predicted_device_bytes"]);
  CHECK(told["predicted_step_s"] == adapted[0]["predicted_step_s"]);
  const Output own = shardlab_program(scratch, "search --profile shardlab --lora-rank 16 " + model);
  CHECK(own.code == 2);
  CHECK(own.err.find("adapters and frozen weights are not executed by shardlab\n  name a framework that trains them") !=
        std::string::npos);
}

TEST_CASE("what search prints to go on with runs as it is printed, under every framework") {
  const Scratch scratch;
  const std::string question =
      "--model llama-3.1-8b --machine hgx-h100-ndr --devices 16 --global-batch-tokens 512Ki --top 2 --precision bf16 ";
  for (const char* profile : {"megatron", "torchtitan", "deepspeed", "nanotron"}) {
    const std::string found = scratch / profile;
    const Output o = shardlab_program(scratch, "search --profile " + std::string(profile) + " " + question + "--out " + found);
    INFO(o.out << o.err);
    REQUIRE(o.code == 0);
    const Output memory = shardlab_program(scratch, "memory " + command_after(o.err, "shardlab memory "));
    INFO(memory.err);
    CHECK(memory.code == 0);
    const std::string run_words = command_after(o.err, "shardlab run ");
    const Output run = shardlab_program(scratch, "run " + run_words + " --out " + found + "-run");
    INFO(run.out << run.err);
    CHECK(run.code == 0);
    const auto row = first_row(found + "-run/results.csv");
    CHECK(row.at("status") == "ok");
    CHECK(std::stod(row.at("predicted_step_s")) ==
          Approx(std::stod(first_row(found + "/results.csv").at("predicted_step_s"))).epsilon(0.02));
  }
}

TEST_CASE("a framework is proposed what it can do, and what it cannot is refused with what it has") {
  const Scratch scratch;
  const std::string question = "--model llama-3.1-8b --machine hgx-h100-ndr --devices 16 --global-batch-tokens 512Ki ";
  const auto layouts = [&](const std::string& words) {
    const Output o = shardlab_program(scratch, "search --format json --top 200 " + question + words);
    INFO(o.err);
    REQUIRE(o.code == 0);
    return nlohmann::json::parse(o.out)["layouts"];
  };
  for (const auto& layout : layouts("--profile megatron --pp 2,4")) {
    CHECK((layout["schedule"] == "1f1b" || layout["schedule"] == "interleaved"));
    CHECK(layout["offload"].get<std::string>().find("activations") == std::string::npos);
  }
  for (const auto& layout : layouts("--profile nanotron")) {
    CHECK(layout["zero"].get<int>() <= 1);
    CHECK(layout["offload"] == "none");
    CHECK(layout["cp"] == 1);
  }
  const Output o = shardlab_program(scratch, "search --profile megatron --pp 2 --schedule zb-h1 " + question);
  CHECK(o.code == 2);
  CHECK(o.err.find("megatron has no zb-h1 among its schedules: 1f1b, interleaved") != std::string::npos);
  CHECK(o.err.find("megatron-zero-bubble") != std::string::npos);
  CHECK(shardlab_program(scratch, "search --profile megatron-zero-bubble --pp 2 --schedule zb-h1 " + question).code == 0);
  const Output memory =
      shardlab_program(scratch, "memory --profile nanotron --zero 3 --model llama-3.1-8b --machine hgx-h100-ndr --devices 8");
  CHECK(memory.code == 2);
  CHECK(memory.err.find("nanotron has no 3 among its stages of ZeRO: 0, 1") != std::string::npos);
}

TEST_CASE("sizes of buckets and algorithms of collectives are varied where they are named, and what is found runs") {
  const Scratch scratch;
  const std::string question =
      "--model gpt2 --machine hgx-h100-ndr --devices 64 --global-batch-tokens 64Ki --seq-len 1024 --tp 1 --pp 1 --cp 1 --zero 0 "
      "--offload none --recompute none --precision bf16 --top 50 ";
  const Output o = shardlab_program(scratch, "search --format json --profile shardlab " + question +
                                                 "--bucket-bytes 1Mi,25Mi,1Gi --collective-algorithm ring,halving-doubling,direct");
  INFO(o.err);
  REQUIRE(o.code == 0);
  const auto json = nlohmann::json::parse(o.out);
  std::map<std::string, std::map<int64_t, double>> seconds;
  for (const auto& l : json["layouts"])
    if (l["micro_batch"] == 1) seconds[l["collective_algorithm"]][l["bucket_bytes"].get<int64_t>()] = l["predicted_step_s"];
  REQUIRE(seconds.size() == 3);
  for (const auto& [algorithm, by_bucket] : seconds) CHECK(by_bucket.size() == 3);
  // 64 ranks on 8 nodes: a ring has ten times the steps of halving-doubling, which many small buckets pay each. Of one large bucket
  // halving-doubling sends 7/8 by the rail of each rank, and rings send an eighth of what they have.
  CHECK(seconds["ring"][1 << 20] > seconds["halving-doubling"][1 << 20]);
  CHECK(seconds["ring"][1 << 30] < seconds["halving-doubling"][1 << 30]);
  CHECK(seconds["ring"][1 << 20] > seconds["ring"][25 << 20]);
  CHECK(json["layouts"][0]["collective_algorithm"] == "ring");
  CHECK(json["layouts"][0]["bucket_bytes"] == 1 << 30);
  // What it prints and writes says both.
  for (const std::string profile : {"shardlab", "megatron"}) {
    const std::string found = scratch / profile;
    const Output table = shardlab_program(
        scratch, "search --profile " + profile + " " + question + "--bucket-bytes 25Mi --collective-algorithm ring --out " + found);
    INFO(table.out << table.err);
    REQUIRE(table.code == 0);
    CHECK(table.out.find("bucket-25Mi ring") != std::string::npos);
    const std::string words = command_after(table.err, "shardlab memory ");
    CHECK(words.find("--bucket-bytes 26214400 --collective-algorithm ring") != std::string::npos);
    CHECK(shardlab_program(scratch, "memory " + words).code == 0);
    CHECK(shardlab_program(scratch, "run " + command_after(table.err, "shardlab run ") + " --out " + found + "-run").code == 0);
    const auto row = first_row(found + "-run/results.csv");
    CHECK(row.at("bucket_bytes") == "26214400");
    CHECK(row.at("collective_algorithm") == "ring");
  }
  for (const auto& [words, says] : std::vector<std::pair<std::string, std::string>>{
           {"--profile megatron --collective-algorithm halving-doubling",
            "leaves collectives to NCCL, which has no halving-doubling"},
           {"--profile torchtitan --bucket-bytes 25Mi",
            "torchtitan has no 0 among its stages of ZeRO whose buckets have a size to choose"},
           {"--profile megatron --bucket-bytes 0", "whose buckets have a size"},
           {"--profile shardlab --collective-algorithm tree", "collective_algorithm `tree` is unknown"}}) {
    const Output refused = shardlab_program(scratch, "search " + question + words);
    INFO(refused.err);
    CHECK(refused.code == 2);
    CHECK(refused.err.find(says) != std::string::npos);
  }
}

TEST_CASE("under shardlab every layout that is proposed is one that shardlab runs") {
  const Scratch scratch;
  const Output o = shardlab_program(scratch,
                                    "search --format json --profile shardlab --top 40 --model tiny-llama --machine hgx-h100-ndr "
                                    "--devices 8 --global-batch-tokens 16Ki --seq-len 256");
  INFO(o.err);
  REQUIRE(o.code == 0);
  const auto json = nlohmann::json::parse(o.out);
  REQUIRE(json["layouts"].size() == 40);
  for (size_t i = 0; i < 40; i += 13) {
    const auto& l = json["layouts"][i];
    std::string words = "memory --format json --profile shardlab --model tiny-llama --machine hgx-h100-ndr --devices 8";
    for (const char* key : {"dp", "tp", "pp", "vpp", "zero", "micro_batch", "grad_accumulation", "seq_len"})
      words += fmt::format(" --{} {}", key, l[key].get<int64_t>());
    for (const char* key : {"schedule", "recompute", "offload", "precision"})
      words += fmt::format(" --{} {}", key, l[key].get<std::string>());
    words += fmt::format(" --sequence_parallel {}", l["sequence_parallel"].get<bool>());
    if (l.contains("hybrid_shard")) words += fmt::format(" --hybrid_shard {}", l["hybrid_shard"].get<int>());
    const Output memory = shardlab_program(scratch, words);
    INFO(words << memory.err);
    REQUIRE(memory.code == 0);
    CHECK(nlohmann::json::parse(memory.out)["peak"] == l["predicted_peak_bytes"]);
  }
}

TEST_CASE("ranges name the sizes that can be in them") {
  const Scratch scratch;
  const std::string question =
      "search --format json --profile megatron --top 300 --model llama-3.1-8b --machine hgx-h100-ndr --devices 16 "
      "--global-batch-tokens 512Ki ";
  const auto json = [&](const std::string& words) {
    const Output o = shardlab_program(scratch, question + words);
    INFO(words << o.err);
    REQUIRE(o.code == 0);
    return nlohmann::json::parse(o.out);
  };
  const auto few = json("--tp '<=2' --pp 2..4 --micro-batch '<4' --zero 0..1 --cp 1");
  for (const auto& l : few["layouts"]) {
    CHECK(l["tp"].get<int>() <= 2);
    CHECK((l["pp"] == 2 || l["pp"] == 4));
    CHECK(l["micro_batch"].get<int>() < 4);
    CHECK(l["zero"].get<int>() <= 1);
  }
  CHECK(few["points"] == json("--tp 1,2 --pp 2,4 --micro-batch 1,2 --zero 0,1 --cp 1")["points"]);
  const Output o = shardlab_program(scratch, question + "--tp 9..15");
  CHECK(o.code == 2);
  CHECK(o.err.find("tp `9..15` holds no possible value") != std::string::npos);
  CHECK(o.err.find("1, 2, 4, 8, 16") != std::string::npos);
}

TEST_CASE("a deadline makes a search for cost take the cheapest in time") {
  const Scratch scratch;
  const std::string question =
      "search --format json --top 1 --profile megatron --model llama-3.1-8b --machine hgx-h100-ndr --devices 8,16,64 "
      "--global-batch-tokens 512Ki --cp 1 --offload none --tokens 1T --objective cost ";
  const auto best = [&](const std::string& words) {
    const Output o = shardlab_program(scratch, question + words);
    INFO(o.err);
    REQUIRE(o.code == 0);
    return nlohmann::json::parse(o.out)["layouts"][0];
  };
  const auto any = best(""), soon = best("--max-days 40");
  REQUIRE(any["predicted_days"].get<double>() > 40);
  CHECK(soon["predicted_days"].get<double>() <= 40);
  CHECK(soon["predicted_usd"].get<double>() >= any["predicted_usd"].get<double>());
  const Output never = shardlab_program(scratch, question + "--max-days 0.001");
  CHECK(never.code == 3);
  const Output said = shardlab_program(scratch, question.substr(0, 7) + question.substr(21) + "--max-days 0.001");
  CHECK(said.out.starts_with("Nothing is in time. The fastest that fits, "));
  CHECK(said.out.find(" days too late: take more --devices, or raise --max-days.") != std::string::npos);
  const Output no_run =
      shardlab_program(scratch,
                       "search --model llama-3.1-8b --machine hgx-h100-ndr --devices 8 --global-batch-tokens 512Ki "
                       "--profile megatron --max-days 3");
  CHECK(no_run.code == 2);
  CHECK(no_run.err.find("--tokens 1T") != std::string::npos);
}

TEST_CASE("a margin is kept free, and prices come from the flag, else from the machine file") {
  const Scratch scratch;
  const auto best = [&](const std::string& words) {
    const Output o = shardlab_program(scratch, std::string("search --format json --top 1 --profile megatron ") + kQuestion + words);
    INFO(o.err);
    REQUIRE(o.code == 0);
    return nlohmann::json::parse(o.out)["layouts"][0];
  };
  const auto bare = best("--margin 0 --price 2"), wide = best("--margin 30% --price 4");
  CHECK(wide["predicted_device_bytes"].get<double>() <= 0.7 * 84'934'656'000.0);
  CHECK(bare["predicted_device_bytes"].get<int64_t>() > wide["predicted_device_bytes"].get<int64_t>());
  CHECK(bare["predicted_step_s"].get<double>() <= wide["predicted_step_s"].get<double>());
  CHECK(bare["predicted_usd"].get<double>() == Approx(2 * bare["predicted_device_hours"].get<double>()));
  CHECK(wide["predicted_usd"].get<double>() == Approx(4 * wide["predicted_device_hours"].get<double>()));
  const auto listed = best("");
  CHECK(listed["predicted_usd"].get<double>() == Approx(3.99 * listed["predicted_device_hours"].get<double>()));
}

TEST_CASE("tokens of a run are a number above 0, in billions too") {
  CHECK(parse_tokens("300B") == 300e9);
  CHECK(parse_tokens("1.5B") == 1.5e9);
  CHECK(parse_tokens("1.4T") == 1.4e12);
  for (const char* no : {"", "B", "0", "0B", "-1B", "3TB", "3 B", "3b", "nanB"}) {
    INFO(no);
    CHECK(!parse_tokens(no).has_value());
  }
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
      {good + "--tp nan", "not a number"},
      {good + "--micro-batch 99999999999999999999", "not a number"},
      {good + "--offload disk", "activations=nvme"},
      {good + "--precision fp7", "fp8"},
      {good + "--profile nobody", "nobody"},
      {good + "--tokens none", "--tokens none"},
      {good + "--margin 5", "write --margin 5%"},
      {good + "--tp '<x'", "not a range of numbers"},
      {good + "--format xml", "markdown"},
      {good + "--set layout.dp=2", "layouts and what is trained have flags of their own"},
      {good + "--set layout.expert_bound=2", "ask `shardlab memory --profile shardlab --expert-bound F` of a layout"},
      {"search --model tiny-llama --machine hgx-h100-ndr --devices 0 --global-batch-tokens 16Ki", "devices 0"},
      {"search --model tiny-llama --machine hgx-h100-ndr --devices 8 --global-batch-tokens 1000 --seq-len 256",
       "is not a multiple of seq_len 256\n  set 768 or 1024"},
      {"search --model tiny-llama --machine hgx-h100-ndr --devices 8 --global-batch-tokens -1", "not a size"},
      {"search --model tiny-llama --machine hgx-h100-ndr --devices 8 --seq-len 256 --global-batch-tokens 9223372036854775807",
       "--global-batch-tokens 9223372036854775807 is not a size\n  expected a whole number from 1 to 8192Ti"},
      {"search --model tiny-llama --machine hgx-h100-ndr --devices 8 --global-batch-tokens 16Ki --seq-len 9223372036854775807",
       "--seq-len 9223372036854775807 is not a size"}};
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
