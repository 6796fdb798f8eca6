// The program as a user meets it: exit codes, messages, and the files of a run.
#include <fmt/format.h>
#include <sqlite3.h>
#include <sys/wait.h>

#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <future>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "cases/recorded_case.h"
#include "plan/base/error_entries.h"
#include "profiler/trace_file.h"
#include "reports/table.h"
#include "tests/cli/program.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

using testing::cell;
using testing::Output;
using testing::Rows;
using testing::Scratch;
using testing::shardlab_program;
using testing::slurp;
namespace fs = std::filesystem;

std::string machine_option() { return fmt::format(" --machine-file {}/tests/cli/local.yaml ", testing::source_dir()); }

/// A sweep of tiny cases that are trained for real.
std::string tiny_sweep(const std::string& more) {
  return "version: 1\nname: tiny\nmode: measure\n"
         "model: {inline: {family: gpt, layers: 2, hidden: 32, heads: 4, ffn: 64, vocab: 256, max_positions: 32, tied_embeddings: "
         "true}}\n"
         "machine: {local: true}\ndata: {text: text.txt}\n"
         "train: {seq_len: 16, global_batch_tokens: 64}\nmeasure: {warmup: 1, steps: 2, repeat: 1, timeout: 1m}\n" +
         more;
}

std::string some_text() {
  std::string text;
  for (int i = 0; i < 200; ++i) text += fmt::format("line {} of a text that a small model can learn from\n", i % 17);
  return text;
}

std::string expert_sweep() {
  return "version: 1\nname: experts\nmode: measure\n"
         "model: {inline: {family: llama, layers: 2, hidden: 32, heads: 4, ffn: 64, vocab: 256, max_positions: 32, experts: 4, "
         "top_k: 2, moe_ffn: 16}}\n"
         "machine: {local: true}\ndata: {text: text.txt}\n"
         "train: {seq_len: 16, micro_batch: 1, grad_accumulation: 4, clip_norm: 1e-3}\nlayout: {pp: 2, schedule: zb-h2}\n"
         "measure: {warmup: 2, steps: 2, repeat: 2, timeout: 1m}\n"
         "include:\n  - {name: in_step}\n  - {name: later, post_validation: 2}\n"
         "  - {name: unclipped, clip_norm: 1e6}\n  - {name: unclipped_later, clip_norm: 1e6, post_validation: 2}\n";
}

void sql(const std::string& path, const std::string& statement) {
  sqlite3* handle = nullptr;
  REQUIRE(sqlite3_open(path.c_str(), &handle) == SQLITE_OK);
  REQUIRE(sqlite3_exec(handle, statement.c_str(), nullptr, nullptr, nullptr) == SQLITE_OK);
  sqlite3_close(handle);
}

/// The folder of checkpoints of the one case of a run directory; empty while there is none.
std::string checkpoints_in(const std::string& run) {
  std::error_code none;
  for (const auto& entry : fs::directory_iterator(run, none))
    if (fs::exists(entry.path() / "checkpoints")) return (entry.path() / "checkpoints").string();
  return "";
}

/// Kills, without warning, the process whose command line ends with `argument`.
void kill_process(const std::string& argument) {
  for (const auto& entry : fs::directory_iterator("/proc")) {
    const std::string name = entry.path().filename().string();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    const std::string line = slurp(entry.path() / "cmdline");  // arguments, each ended by a zero
    if (line.ends_with(argument + '\0')) kill(static_cast<pid_t>(std::stol(name)), SIGKILL);
  }
}

TEST_CASE("bad input is refused before anything runs, with a remedy and exit code 2") {
  const Scratch scratch;
  scratch.write("text.txt", some_text());
  struct Bad {
    std::string sweep, message;
  };
  for (const Bad& bad : {Bad{"axes: {tp: [2]}\nspeed: 3\n", "unknown key `speed`"},
                         Bad{"axes: {tp: [2], tp: [4]}\n", "duplicate key `tp`"}, Bad{"axes: {tp: [two]}\n", "two"}}) {
    const std::string file = scratch.write("bad.yaml", tiny_sweep(bad.sweep));
    const Output output = shardlab_program(scratch, "run " + file + machine_option() + " --out " + (scratch / "out"));
    INFO(output.err);
    REQUIRE(output.code == 2);
    REQUIRE(output.err.find(bad.message) != std::string::npos);
    REQUIRE(output.err.find("bad.yaml:") != std::string::npos);
    REQUIRE_FALSE(fs::exists(scratch / "out/results.csv"));
  }
  const Output missing = shardlab_program(scratch, "run " + (scratch / "missing.yaml"));
  REQUIRE(missing.code == 2);
  REQUIRE(missing.err.find("missing.yaml") != std::string::npos);
  REQUIRE(shardlab_program(scratch, "run").code == 2);
  const Output unknown = shardlab_program(scratch, "frobnicate");
  REQUIRE(unknown.code == 2);
  REQUIRE(unknown.err.find("there is no verb `frobnicate`") != std::string::npos);
  const std::string many = scratch.write("many.yaml", tiny_sweep("axes: {tp: [1, 2]}\n"));
  REQUIRE(shardlab_program(scratch, "run " + many + machine_option() + " --jobs 2 --out " + (scratch / "out")).code == 2);
  REQUIRE_FALSE(fs::exists(scratch / "out"));
  REQUIRE(shardlab_program(scratch, "model list --format xml").code == 2);
}

TEST_CASE("a refusal of which there is more to say names a code, and explain prints what it is") {
  const Scratch scratch;
  const auto refused = [&](const std::string& flags) {
    const Output output = shardlab_program(scratch, "memory --machine hgx-h100-ndr --profile shardlab " + flags);
    CHECK(output.code == 2);
    return output.err;
  };
  CHECK(refused("--model tiny-gpt --precision fp4") ==
        "shardlab: command line: precision=fp4 is not implemented in this version\n"
        "  use precision: fp32, bf16, fp16 or fp8, or name a framework that has it: --profile megatron\n"
        "  more: shardlab explain E101\n");
  CHECK(refused("--model tiny-gpt --zero 1 --dp 1") ==
        "shardlab: command line: zero=1 with dp=1: there is nothing to shard over\n  set zero: 0, or dp above 1\n"
        "  more: shardlab explain E102\n");
  CHECK(refused("--model glm-4.5-air --devices 64").ends_with("\n  more: shardlab explain E103\n"));
  CHECK(refused("--model tiny-gpt --dp 1 --seq-len 999999") ==
        "shardlab: command line: seq_len=999999 exceeds the model's max_positions=256\n  set seq_len to 256 or less\n");
  for (const ErrorEntry& e : error_entries()) {
    const Output said = shardlab_program(scratch, fmt::format("explain {}", e.code));
    CHECK(said.code == 0);
    CHECK(said.out == to_string(e));
  }
  const Output json = shardlab_program(scratch, "explain E101 --format json");
  CHECK(nlohmann::json::parse(json.out)[0]["title"] == "a value that this version does not implement");
  CHECK(shardlab_program(scratch, "explain e101").out == to_string(error_entries().front()));
  std::filesystem::create_directories(std::filesystem::path(scratch / "here") / "e2");  // a directory, and no code
  CHECK(
      shardlab_program(scratch, "explain e2", "cd " + (scratch / "here") + " &&").err.starts_with("shardlab: e2 holds no results"));
  for (const char* code : {"E999", "E9999", "E1"}) {
    const Output unknown = shardlab_program(scratch, fmt::format("explain {}", code));
    CHECK(unknown.code == 2);
    CHECK(unknown.err.find(fmt::format("no refusal has the code `{}`\n  codes:\n  E101  ", code)) != std::string::npos);
  }
}

TEST_CASE("what the file system refuses is said, with exit code 6 or in its row, and never an abort") {
  const Scratch scratch;
  scratch.write("text.txt", some_text());
  const std::string file = scratch.write("sweep.yaml", tiny_sweep("include: [{name: a, dp: 1}, {name: b, dp: 2}]\n"));
  const std::string long_name(300, 'x');
  const Output too_long = shardlab_program(scratch, "run " + file + machine_option() + " --out " + (scratch / long_name));
  INFO(too_long.err);
  REQUIRE(too_long.code == 6);
  REQUIRE(too_long.err.find("File name too long") != std::string::npos);
  REQUIRE(shardlab_program(scratch, "explain " + (scratch / long_name)).code == 2);
  REQUIRE(shardlab_program(scratch, "explain nowhere").err.find("there is no directory nowhere") != std::string::npos);

  // A file where the folder of a case should be.
  const Output first = shardlab_program(scratch, "run " + file + machine_option() + " --out " + (scratch / "first"));
  REQUIRE(first.code == 0);
  const std::string id = cell(parse_csv(slurp(scratch / "first/results.csv")), 1, "case_id");
  fs::create_directory(scratch / "second");
  scratch.write("second/" + id, "in the way");
  const Output second = shardlab_program(scratch, "run " + file + machine_option() + " --out " + (scratch / "second"));
  INFO(second.err);
  REQUIRE(second.code == 4);
  const Rows rows = parse_csv(slurp(scratch / "second/results.csv"));
  REQUIRE(cell(rows, 1, "status") == "failed");
  REQUIRE(cell(rows, 1, "reason").find(id) != std::string::npos);
  REQUIRE(cell(rows, 2, "status") == "ok");
}

TEST_CASE("illegal points keep their row and their reason, and cost nothing else") {
  const Scratch scratch;
  scratch.write("text.txt", some_text());
  const std::string file = scratch.write("sweep.yaml", tiny_sweep("include:\n"
                                                                  "  - {name: good, dp: 1}\n"
                                                                  "  - {name: heads, dp: 1, tp: 3}\n"
                                                                  "  - {name: stages, dp: 1, pp: 4, schedule: 1f1b}\n"
                                                                  "  - {name: batch, dp: 1, micro_batch: 3}\n"
                                                                  "  - {name: good2, dp: 2, zero: 1}\n"));
  const Output output =
      shardlab_program(scratch, "run " + file + machine_option() + " --out " + (scratch / "out") + " --format csv");
  INFO(output.err);
  REQUIRE(output.code == 0);
  const Rows rows = parse_csv(slurp(scratch / "out/results.csv"));
  REQUIRE(rows.size() == 6);
  REQUIRE(cell(rows, 1, "status") == "ok");
  REQUIRE(cell(rows, 2, "status") == "refused");
  REQUIRE(cell(rows, 2, "reason").find("heads 4 is not divisible by tp=3") != std::string::npos);
  REQUIRE(cell(rows, 3, "status") == "refused");
  REQUIRE(cell(rows, 3, "reason").find("pp=4 stages for 2 layers") != std::string::npos);
  REQUIRE(cell(rows, 4, "status") == "refused");
  REQUIRE(cell(rows, 5, "status") == "ok");
  for (const size_t row : {1, 5}) {
    REQUIRE(std::stod(cell(rows, row, "loss_first")) > 5.0);
    REQUIRE(std::stod(cell(rows, row, "measured_step_s")) > 0);
    REQUIRE(std::stoll(cell(rows, row, "measured_peak_bytes")) > 0);
  }
  REQUIRE(cell(rows, 1, "measured_wire_bytes") == "0");
  REQUIRE(std::stoll(cell(rows, 5, "measured_wire_bytes")) > 0);

  SECTION("the directory is not overwritten, and --resume has nothing left to do") {
    REQUIRE(shardlab_program(scratch, "run " + file + machine_option() + " --out " + (scratch / "out")).code == 2);
    const std::string before = slurp(scratch / "out/results.csv");
    const Output again = shardlab_program(scratch, "run " + file + machine_option() + " --resume --out " + (scratch / "out"));
    INFO(again.err);
    REQUIRE(again.code == 0);
    REQUIRE(slurp(scratch / "out/results.csv") == before);
  }
  SECTION("--resume of another sweep is refused: a directory holds one") {
    std::string other = tiny_sweep("include: [{name: good, dp: 1}]\n");
    other.replace(other.find("name: tiny"), 10, "name: other");
    const Output mixed = shardlab_program(
        scratch, "run " + scratch.write("other.yaml", other) + machine_option() + " --resume --out " + (scratch / "out"));
    REQUIRE(mixed.code == 2);
    REQUIRE(mixed.err.find("holds results of the sweep `tiny`, and this one is `other`") != std::string::npos);
  }
  SECTION("--resume of a sweep that has lost points speaks of those it has") {
    const Output fewer =
        shardlab_program(scratch, "run " + scratch.write("sweep.yaml", tiny_sweep("include: [{name: good2, dp: 2, zero: 1}]\n")) +
                                      machine_option() + " --resume --out " + (scratch / "out"));
    INFO(fewer.err);
    REQUIRE(fewer.code == 0);
    REQUIRE(fewer.out.find("good2") != std::string::npos);
    REQUIRE(fewer.out.find("heads") == std::string::npos);
    REQUIRE(fewer.err.find("4 of the directory's results are of points that this sweep no longer has") != std::string::npos);
  }
  SECTION("--resume runs again what another build stored") {
    const std::string version = cell(rows, 1, "program_version");
    REQUIRE(version.find('+') != std::string::npos);  // version and commit
    sql(scratch / "out/results.sqlite",
        fmt::format("UPDATE cases SET outcome = replace(outcome, '{}', '{}another') WHERE name = 'good'", version, version));
    const Output again = shardlab_program(scratch, "run " + file + machine_option() + " --resume --out " + (scratch / "out"));
    INFO(again.err);
    REQUIRE(again.code == 0);
    const Rows after = parse_csv(slurp(scratch / "out/results.csv"));
    REQUIRE(cell(after, 1, "program_version") == version);
    REQUIRE(cell(after, 1, "measured_step_s") != cell(rows, 1, "measured_step_s"));
    REQUIRE(cell(after, 5, "measured_step_s") == cell(rows, 5, "measured_step_s"));
  }
  SECTION("report and explain read it") {
    const Output report = shardlab_program(scratch, "report " + (scratch / "out") + " --html " + (scratch / "report.html"));
    INFO(report.err);
    REQUIRE(report.code == 0);
    const std::string page = slurp(scratch / "report.html");
    REQUIRE(page.find("<html") != std::string::npos);
    REQUIRE(page.find("data-timelines=\"2\"") != std::string::npos);
    REQUIRE(report.err.find("warning") == std::string::npos);
    const Output explained = shardlab_program(scratch, "explain " + (scratch / "out/good2"));
    INFO(explained.err);
    REQUIRE(explained.code == 0);
    REQUIRE(explained.out.find("attention") != std::string::npos);
    REQUIRE(shardlab_program(scratch, "explain " + (scratch / "out/nothing")).code == 2);
    const Output ops = shardlab_program(scratch, "explain " + (scratch / "out") + " --format json");
    REQUIRE(nlohmann::json::parse(ops.out).is_array());
  }
}

TEST_CASE("a run that is saved under one layout and resumed under another ends as one that never stopped") {
  const Scratch scratch;
  scratch.write("text.txt", some_text());
  const std::string file =
      scratch.write("sweep.yaml", tiny_sweep("execution: {canonical: true}\ninclude: [{name: only, dp: 1}]\n"));
  const auto run = [&](const std::string& out, const std::string& flags, int code) {
    const Output output = shardlab_program(scratch, "run " + file + machine_option() + " --out " + (scratch / out) + flags);
    INFO(output.err);
    REQUIRE(output.code == code);
    return parse_csv(slurp(scratch / (out + "/results.csv")));
  };
  const std::string whole = cell(run("whole", " --set measure.steps=5", 0), 1, "loss_last");  // after one step of warm-up
  const Rows first = run("first", " --set checkpoint.save_every=2 --set dp=2 --set zero=1", 0);
  const std::string folder = (scratch / "first") + "/" + cell(first, 1, "case_id") + "/checkpoints";
  CHECK(fs::exists(folder + "/step-00000002.manifest"));
  CHECK(fs::exists(folder + "/step-00000003.manifest"));
  const std::string resume = " --set checkpoint.resume=" + folder;
  CHECK(cell(run("second", " --set tp=2" + resume, 0), 1, "loss_last") == whole);
  CHECK(cell(run("third", " --set measure.steps=3" + resume + "/step-00000002.manifest", 0), 1, "loss_last") == whole);

  // A checkpoint that does not fit fails its case by name; a folder for two cases is refused before anything runs.
  const Rows other = run("other", " --set seed=7" + resume, 4);
  CHECK(cell(other, 1, "reason").find("saved with seed=1, and this case has 7") != std::string::npos);
  const std::string two = scratch.write("two.yaml", tiny_sweep("checkpoint: {save_every: 1, folder: here}\naxes: {dp: [1, 2]}\n"));
  const Output refused = shardlab_program(scratch, "run " + two + machine_option() + " --out " + (scratch / "two"));
  CHECK(refused.code == 2);
  CHECK(refused.err.find("two cases save their checkpoints in") != std::string::npos);
}

TEST_CASE("routes that a case leaves predict its rows, its imbalance and its bytes, and a named routing others") {
  const Scratch scratch;
  const std::string machine = fmt::format(" --machine-file {}/tests/cli/calibrated.yaml ", testing::source_dir());
  scratch.write("text.txt", some_text());
  const std::string sweep = scratch.write(
      "routes.yaml",
      "version: 1\nname: routes\nmode: both\n"
      "model: {inline: {family: llama, layers: 2, hidden: 32, heads: 4, ffn: 64, vocab: 256, max_positions: 32, experts: 4, "
      "top_k: 2, moe_ffn: 16}}\n"
      "machine: {local: true}\ndata: {text: text.txt}\ntrain: {seq_len: 16, micro_batch: 1, grad_accumulation: 4}\n"
      "layout: {dp: 2, ep: 2}\nmeasure: {warmup: 1, steps: 2, repeat: 1, timeout: 1m}\n");
  const auto results = [&](const std::string& name, const std::string& words) {
    const Output run = shardlab_program(scratch, "run " + sweep + machine + words + " --out " + (scratch / name));
    INFO(run.err);
    REQUIRE(run.code == 0);
    return parse_csv(slurp(scratch / (name + "/results.csv")));
  };
  const auto measured = results("measured", "");
  CHECK(cell(measured, 1, "predicted_expert_rank_imbalance") == "1");
  CHECK(cell(measured, 1, "predicted_expert_imbalance") == "1");
  CHECK(std::stod(cell(measured, 1, "expert_rank_imbalance_last")) > 1);
  CHECK(std::stod(cell(measured, 1, "expert_rank_imbalance_peak")) > std::stod(cell(measured, 1, "expert_rank_imbalance_last")));
  std::string routes;
  for (const auto& entry : fs::directory_iterator(scratch / "measured"))
    if (fs::exists(entry.path() / "routes.txt")) routes = (entry.path() / "routes.txt").string();
  REQUIRE_FALSE(routes.empty());
  const auto recorded = results("recorded", " --mode simulate --set data.routes=" + routes);
  CHECK(cell(recorded, 1, "predicted_expert_imbalance") == cell(measured, 1, "expert_imbalance_last"));
  CHECK(cell(recorded, 1, "predicted_expert_rank_imbalance") == cell(measured, 1, "expert_rank_imbalance_last"));
  CHECK(cell(recorded, 1, "predicted_wire_bytes") == cell(measured, 1, "measured_wire_bytes"));
  CHECK(std::stoll(cell(recorded, 1, "predicted_expert_exchange_bytes")) > 0);
  // A resumed run takes what it has where the file says what it said, and predicts anew where it does not.
  const std::string changed = scratch.write("changed.txt", slurp(routes)),
                    resumed = " --mode simulate --resume --set data.routes=" + changed;
  CHECK(results("resumed", resumed).size() == 2);
  CHECK(results("resumed", resumed).size() == 2);
  scratch.write("changed.txt", [&] {
    std::string text = "shardlab routes 1\n";
    for (const char* place : {"layer 0 source 0", "layer 0 source 1", "layer 1 source 0", "layer 1 source 1"})
      text += fmt::format("{} rows 64 64 0 0\n", place);
    return text;
  }());
  const auto anew = results("resumed", resumed);
  CHECK(cell(anew, anew.size() - 1, "predicted_expert_rank_imbalance") == "2");
  const auto forced = results("forced", " --mode simulate --set data.routing=forced:2");
  CHECK(cell(forced, 1, "predicted_expert_rank_imbalance") == "2");
  CHECK(std::stod(cell(forced, 1, "predicted_step_s")) > std::stod(cell(recorded, 1, "predicted_step_s")));
  const auto refused = [&](const std::string& words) {
    const Output run =
        shardlab_program(scratch, "run " + sweep + machine + " --mode simulate " + words + " --out " + (scratch / "no"));
    fs::remove_all(scratch / "no");
    return run.out + run.err;
  };
  CHECK(refused("--set data.routing=zipf").find("zipf:S") != std::string::npos);
  CHECK(refused("--set data.routing=forced:1").find("choose from forced:2 to forced:4") != std::string::npos);
  CHECK(refused("--set data.routing=zipf:1 --set data.routes=" + routes).find("a prediction takes one") != std::string::npos);
  const Output dense =
      shardlab_program(scratch, "memory --model tiny-llama --machine h100 --dp 2 --seq-len 32 --profile shardlab --routing zipf:1");
  CHECK(dense.code == 2);
  CHECK(dense.err.find("the model has no experts") != std::string::npos);
  for (const char* words : {"memory --model llama-3-8b --profile megatron --routing zipf:1",
                            "search --model llama-3-8b --global-batch-tokens 4Mi --set data.routing=zipf:1"}) {
    const Output other = shardlab_program(scratch, std::string(words) + " --machine h100 --devices 8");
    INFO(other.err);
    CHECK(other.code == 2);
    CHECK(other.err.find("data.routing=zipf:1: the model has no experts") != std::string::npos);
  }
  // The estimate and the search go by the fullest rank.
  const auto memory = [&](const std::string& words) {
    const Output out =
        shardlab_program(scratch, "memory --model mixtral-8x7b --machine h100 --dp 8 --ep 8 --seq-len 1Ki --format json " + words);
    INFO(out.err);
    return nlohmann::json::parse(out.out);
  };
  const auto even = memory(""), zipf = memory("--routing zipf:1");
  CHECK(even["expert_rank_imbalance"] == 1.0);
  CHECK(zipf["expert_rank_imbalance"] > 2.0);
  CHECK(zipf["predicted_step_s"] > even["predicted_step_s"]);
  const auto search = [&](const std::string& words) {
    const Output out =
        shardlab_program(scratch,
                         "search --model mixtral-8x7b --machine h100 --devices 64 --global-batch-tokens 1Mi --seq-len 4Ki "
                         "--ep 8 --tp 1 --pp 4 --top 1 --format json " +
                             words);
    INFO(out.err);
    REQUIRE(out.code == 0);
    return nlohmann::json::parse(out.out)["layouts"][0];
  };
  const auto plain = search(""), skewed = search("--set data.routing=zipf:1");
  CHECK(plain["predicted_expert_rank_imbalance"] == 1.0);
  CHECK(skewed["predicted_expert_rank_imbalance"] == zipf["expert_rank_imbalance"]);
  CHECK(skewed["predicted_step_s"] > plain["predicted_step_s"]);
}

TEST_CASE("steps that run again for want of room have the losses of the worst case, in less memory, and are counted and said") {
  const Scratch scratch;
  scratch.write("text.txt", some_text());
  const std::string sweep = scratch.write(
      "bound.yaml",
      "version: 1\nname: bound\nmode: both\n"
      "model: {inline: {family: llama, layers: 2, hidden: 32, heads: 4, ffn: 64, vocab: 256, max_positions: 32, experts: 4, "
      "top_k: 2, moe_ffn: 64}}\n"
      "machine: {local: true}\ndata: {text: text.txt}\n"
      "train: {seq_len: 32, micro_batch: 4, grad_accumulation: 1}\nlayout: {dp: 2, ep: 2}\ncanonical: true\n"
      "measure: {warmup: 1, steps: 3, repeat: 1, timeout: 1m}\n"
      "include:\n  - {name: worst}\n  - {name: bound, expert_bound: 1.01}\n  - {name: between, expert_bound: 1.01, transport: "
      "processes}\n"
      "  - {name: roomy, expert_bound: 1.95}\n");
  const std::string machine = fmt::format(" --machine-file {}/tests/cli/calibrated.yaml ", testing::source_dir());
  const Output run = shardlab_program(scratch, "run " + sweep + machine + " --out " + (scratch / "out"));
  INFO(run.err);
  REQUIRE(run.code == 0);
  const auto rows = parse_csv(slurp(scratch / "out/results.csv"));
  const auto bytes = [&](size_t row, const char* column) { return std::stoll(cell(rows, row, column)); };
  CHECK(cell(rows, 1, "expert_reruns").empty());
  CHECK(cell(rows, 2, "expert_reruns") == "4");
  CHECK(cell(rows, 3, "expert_reruns") == "4");
  CHECK(cell(rows, 4, "expert_reruns") == "0");
  CHECK(cell(rows, 2, "reason")
            .find("4 of 4 steps ran again, one sequence at a time: expert_bound=1.01 is too tight. A rank had up to 1.") !=
        std::string::npos);
  CHECK(cell(rows, 4, "reason").empty());
  CHECK(cell(rows, 2, "expert_bound") == "1.01");
  for (const size_t row : {size_t{1}, size_t{2}, size_t{3}, size_t{4}}) {
    INFO(row);
    for (const char* column : {"loss_first", "loss_last", "expert_imbalance", "expert_rank_imbalance", "expert_rank_imbalance_last",
                               "expert_rank_imbalance_peak"})
      CHECK(cell(rows, row, column) == cell(rows, 1, column));
    // Of a run without second runs the first plan's peak alone was reached.
    if (row != 4) CHECK(bytes(row, "measured_peak_bytes") == bytes(row, "predicted_peak_bytes"));
    CHECK(bytes(row, "measured_peak_bytes") <= bytes(row, "predicted_peak_bytes"));
  }
  // The second run tells what the first had no room for.
  CHECK(std::stod(cell(rows, 2, "expert_rank_imbalance_peak")) > 1.01);
  CHECK(bytes(2, "predicted_peak_bytes") < bytes(4, "predicted_peak_bytes"));
  CHECK(bytes(4, "predicted_peak_bytes") < bytes(1, "predicted_peak_bytes"));
  CHECK(bytes(2, "measured_wire_bytes") == bytes(1, "measured_wire_bytes") + 2 * 4);  // of the first run, and the flag
  // Of a prediction: routes that all go to the first rank exceed every bound, and a step takes both runs.
  const auto predicted = [&](const std::string& routing) {
    const Output simulated = shardlab_program(
        scratch, "run " + sweep + machine + " --mode simulate --set data.routing=" + routing + " --out " + (scratch / routing));
    INFO(simulated.err);
    REQUIRE(simulated.code == 0);
    return parse_csv(slurp(scratch / (routing + "/results.csv")));
  };
  const auto even = predicted("balanced"), forced = predicted("forced:2");
  CHECK(cell(even, 1, "predicted_expert_reruns").empty());
  CHECK(cell(even, 2, "predicted_expert_reruns") == "0");
  CHECK(cell(even, 2, "predicted_expert_rank_imbalance_peak") == "1");
  CHECK(cell(forced, 1, "predicted_expert_rank_imbalance_peak") == "2");
  CHECK(cell(forced, 1, "predicted_expert_reruns").empty());
  CHECK(cell(forced, 4, "predicted_expert_reruns") == "1");
  CHECK(std::stod(cell(forced, 4, "predicted_step_s")) > 1.5 * std::stod(cell(forced, 1, "predicted_step_s")));
  int second_plans = 0;
  for (const auto& entry : fs::directory_iterator(scratch / "out")) second_plans += fs::exists(entry.path() / "plan.in-step.txt");
  CHECK(second_plans == 3);
}

TEST_CASE("a run in periods, all taken back and made again or none, has the figures of a run in step, loads of experts too") {
  const Scratch scratch;
  scratch.write("text.txt", some_text());
  const std::string sweep = scratch.write("experts.yaml", expert_sweep());
  const Output run = shardlab_program(scratch, "run " + sweep + machine_option() + " --out " + (scratch / "out"));
  INFO(run.err);
  REQUIRE(run.code == 0);
  const auto rows = parse_csv(slurp(scratch / "out/results.csv"));
  REQUIRE(cell(rows, 1, "rolled_back_steps") != cell(rows, 2, "rolled_back_steps"));
  REQUIRE(cell(rows, 2, "rolled_back_steps") == "6");  // 2 before the measured ones
  REQUIRE(cell(rows, 4, "rolled_back_steps") == "0");
  REQUIRE(std::stod(cell(rows, 1, "expert_imbalance")) > 1);
  for (const size_t in_step : {size_t{1}, size_t{3}})
    for (const char* column : {"loss_first", "loss_last", "expert_imbalance", "expert_imbalance_last"}) {
      INFO(column);
      CHECK(cell(rows, in_step, column) == cell(rows, in_step + 1, column));
    }
  // Ops are those of one step.
  const auto layers_of = [&](size_t row) {
    const std::string folder = (scratch / "out") + "/" + cell(rows, row, "case_id");
    const Output explained = shardlab_program(scratch, "explain " + folder + " --rows 0 --format json");
    INFO(explained.err);
    REQUIRE(explained.code == 0);
    std::map<std::string, std::pair<int, double>> ops;
    for (const auto& op : nlohmann::json::parse(explained.out))
      if (const auto name = op["op"].get<std::string>(); name.starts_with("layer."))
        ops[fmt::format("{} {} {}", op["stage"].get<int>(), name, op["kind"].get<std::string>())] = {op["count"].get<int>(),
                                                                                                     op["flops"].get<double>()};
    return ops;
  };
  REQUIRE(layers_of(3).size() > 50);
  CHECK(layers_of(3) == layers_of(4));
}

TEST_CASE("periods that begin between two multiples of save_every are saved where they end") {
  const Scratch scratch;
  scratch.write("text.txt", some_text());
  const std::string file = scratch.write(
      "sweep.yaml", tiny_sweep("execution: {canonical: true}\ninclude: [{name: only, pp: 2, schedule: 1f1b, clip_norm: 1}]\n"));
  const auto run = [&](const std::string& out, const std::string& flags) {
    const Output output = shardlab_program(scratch, "run " + file + machine_option() + " --out " + (scratch / out) +
                                                        " --set checkpoint.folder=" + (scratch / out) + ".saved" + flags);
    INFO(output.err);
    REQUIRE(output.code == 0);
  };
  run("first", " --set checkpoint.save_every=3");
  run("second",
      " --set post_validation=2 --set checkpoint.save_every=4 --set measure.warmup=2 --set measure.steps=8 --set "
      "checkpoint.resume=" +
          (scratch / "first.saved"));
  std::set<std::string> saved;
  for (const auto& entry : fs::directory_iterator(scratch / "second.saved"))
    if (entry.path().extension() == ".manifest") saved.insert(entry.path().stem().string());
  CHECK(saved == std::set<std::string>{"step-00000005", "step-00000009", "step-00000013"});

  // What is no whole period is refused before it runs.
  const Output broken = shardlab_program(scratch, "run " + file + machine_option() + " --out " + (scratch / "third") +
                                                      " --set post_validation=4 --set measure.warmup=0 --set measure.steps=3");
  CHECK(broken.code == 3);
  const Rows rows = parse_csv(slurp(scratch / "third/results.csv"));
  CHECK(cell(rows, 1, "status") == "refused");
  CHECK(cell(rows, 1, "reason").starts_with("measure.steps=3 with post_validation=4"));
}

TEST_CASE("rows that experts had no room for are figures of a run, also where its steps are taken back and made again") {
  const Scratch scratch;
  scratch.write("text.txt", some_text());
  const std::string sweep = scratch.write("experts.yaml", expert_sweep());
  const auto run = [&](const std::string& out, const std::string& factor) {
    const Output output = shardlab_program(
        scratch, "run " + sweep + machine_option() + " --set model.capacity_factor=" + factor + " --out " + (scratch / out));
    INFO(output.err);
    REQUIRE(output.code == 0);
    return parse_csv(slurp(scratch / (out + "/results.csv")));
  };
  const auto tight = run("tight", "1"), roomy = run("roomy", "100"), all = run("all", "0");
  REQUIRE(std::stod(cell(tight, 1, "expert_dropped")) > 0);
  REQUIRE(std::stod(cell(tight, 1, "expert_dropped")) < 1);
  for (const char* column : {"loss_last", "expert_dropped", "expert_dropped_last"}) {
    INFO(column);
    CHECK(cell(tight, 1, column) == cell(tight, 2, column));
  }
  CHECK(std::stod(cell(roomy, 1, "expert_dropped")) == 0);
  CHECK(cell(roomy, 1, "loss_last") == cell(all, 1, "loss_last"));
  CHECK(cell(roomy, 1, "loss_last") != cell(tight, 1, "loss_last"));
  CHECK(cell(all, 1, "expert_dropped").empty());
}

TEST_CASE("a resumed run deals its layers out by the time that they took, and ends as one that never stopped") {
  const Scratch scratch;
  scratch.write("text.txt", some_text());
  const std::string file =
      scratch.write("sweep.yaml", tiny_sweep("execution: {canonical: true}\ninclude: [{name: only, pp: 2, schedule: 1f1b}]\n"));
  const auto run = [&](const std::string& out, const std::string& flags, int code) {
    const Output output =
        shardlab_program(scratch, "run " + file + machine_option() + " --set model.layers=4 --out " + (scratch / out) + flags);
    INFO(output.err);
    REQUIRE(output.code == code);
    return parse_csv(slurp(scratch / (out + "/results.csv")));
  };
  const std::string whole = cell(run("whole", " --set measure.steps=5", 0), 1, "loss_last");  // after one step of warm-up
  const Rows first = run("first", " --set checkpoint.save_every=3", 0);
  const std::string folder = (scratch / "first") + "/" + cell(first, 1, "case_id");
  const auto resumed = [&](const std::string& out, const std::string& more, int code) {
    return run(out, " --set stage_layers=measured --set checkpoint.resume=" + folder + "/checkpoints" + more, code);
  };
  const auto layers_of = [&](const std::string& out, const Rows& rows) {
    const std::string config = slurp((scratch / out) + "/" + cell(rows, 1, "case_id") + "/case.yaml");
    const size_t at = config.find("stage_layers: ");
    REQUIRE(at != std::string::npos);
    return config.substr(at + 14, config.find('\n', at) - at - 14);
  };
  const Rows second = resumed("second", "", 0);
  CHECK(cell(second, 1, "loss_last") == whole);
  const std::string dealt = layers_of("second", second);
  CHECK(std::ranges::count(dealt, ',') == 1);

  // As if the last layer had taken much longer than the rest of its stage: its stage is left to it.
  const CaseFiles files{folder};
  const RecordedCase recorded = read_recorded(files, {}, "measured");
  REQUIRE(recorded.problems.empty());
  REQUIRE(recorded.measured);
  Trace slow = *recorded.measured;
  for (TraceEvent& e : slow.events)
    if (recorded.programs[static_cast<size_t>(recorded.plan->mesh.role_of(e.rank))]
            .instructions[static_cast<size_t>(e.instruction)]
            .layer == 3)
      e.end += 1;
  profiler::write_trace_lines(files.measured(), *recorded.plan, recorded.programs, slow);
  const Rows third = resumed("third", "", 0);
  CHECK(layers_of("third", third).find("3,1") != std::string::npos);
  CHECK(cell(third, 1, "loss_last") == whole);

  const auto refused = [&](const std::string& out, const std::string& more) { return cell(resumed(out, more, 3), 1, "reason"); };
  const auto has = [](const std::string& text, const std::string& word) { return text.find(word) != std::string::npos; };
  CHECK(has(refused("deeper", " --set model.layers=6"), "the run has 4 layers, and this case has 6"));
  const std::string plan = slurp(files.plan());
  std::ofstream(files.plan()) << plan << "\n";
  const std::string changed = refused("changed", "");
  INFO(changed);
  CHECK(has(changed, "stage_layers=measured: " + folder + ": measured.trace.jsonl.gz is of plan "));
  CHECK(has(changed, "or set stage_layers: balanced"));
  fs::remove(files.plan());
  CHECK(has(refused("planless", ""), "plan.txt is missing"));
  std::ofstream(files.plan()) << plan;
  fs::remove(files.measured());
  CHECK(has(refused("traceless", ""), folder + ": there is no measured trace"));
}

TEST_CASE(
    "a case whose process is killed in a step is named with its signal, and its last checkpoint goes on under another layout") {
  const Scratch scratch;
  scratch.write("text.txt", some_text());
  const std::string file =
      scratch.write("sweep.yaml", tiny_sweep("execution: {canonical: true}\ninclude: [{name: only, dp: 1}]\n"));
  const auto command = [&](const std::string& out, const std::string& flags) {
    return "run " + file + machine_option() + " --out " + (scratch / out) + flags;
  };
  // Far more steps than it will live for; killed when three checkpoints are complete.
  std::future<Output> killed = std::async(std::launch::async, [&] {
    return shardlab_program(scratch, command("killed", " --set measure.warmup=200000 --set checkpoint.save_every=1 --set dp=2"));
  });
  std::string folder;
  while (killed.wait_for(std::chrono::milliseconds(2)) == std::future_status::timeout) {
    folder = checkpoints_in(scratch / "killed");
    if (folder.empty() || !fs::exists(folder + "/step-00000003.manifest")) continue;
    kill_process(fs::path(folder).parent_path().string());
    break;
  }
  const Output output = killed.get();
  INFO(output.err);
  REQUIRE(output.code == 4);
  const Rows rows = parse_csv(slurp(scratch / "killed/results.csv"));
  CHECK(cell(rows, 1, "status") == "failed");
  CHECK(cell(rows, 1, "reason").find("ended by signal 9") != std::string::npos);

  int64_t saved = 0;  // what is there is complete: a manifest is placed last
  while (fs::exists(fmt::format("{}/step-{:08}.manifest", folder, saved + 1))) ++saved;
  REQUIRE(saved >= 3);
  const auto loss = [&](const std::string& out, int64_t steps, const std::string& flags) {
    const Output ran = shardlab_program(scratch, command(out, fmt::format(" --set measure.steps={}{}", steps, flags)));
    INFO(ran.err);
    REQUIRE(ran.code == 0);
    return cell(parse_csv(slurp(scratch / (out + "/results.csv"))), 1, "loss_last");
  };
  const std::string whole = loss("whole", saved + 2, "");  // one step of warm-up more
  CHECK(loss("resumed", 2, " --set tp=2 --set checkpoint.resume=" + folder) == whole);
}

TEST_CASE("a run says what its sweep leaves open, and nothing of what it says") {
  const Scratch scratch;
  const std::string base = "version: 1\nname: open\nmode: simulate\nresolution: segments\nmodel: tiny-llama\nmachine: h100\n";
  int number = 0;
  const auto assumed = [&](const std::string& more) {
    const std::string run = scratch / fmt::format("run{}", ++number);
    const Output o = shardlab_program(scratch, "run " + scratch.write("open.yaml", base + more) + " --out " + run);
    INFO(o.out << o.err);
    REQUIRE(o.code == 0);
    const size_t at = o.err.find("assumed");
    return at == std::string::npos ? std::string() : o.err.substr(at, o.err.find('\n', at) - at);
  };
  const std::string tail = "; otherwise: the key in the file, or --set KEY=VALUE";
  CHECK(assumed("layout: {dp: 1}\n") ==
        "assumed, as the sweep does not say: seq_len=256 micro_batch=1 grad_accumulation=1 precision=bf16 optimizer=adamw "
        "profile=shardlab" +
            tail);
  // A schedule is assumed where there is a pipeline, and values that differ from case to case are all named.
  CHECK(assumed("layout: {dp: 1}\ntrain: {seq_len: 256, micro_batch: 1, precision: fp32, optimizer: adamw}\nprofile: shardlab\n"
                "axes: {pp: [1, 2]}\nglobal_batch_tokens: 2Ki\n") == "assumed, as the sweep does not say: schedule=1f1b" + tail);
  CHECK(assumed("layout: {dp: 1}\ntrain: {seq_len: 256, micro_batch: 1, precision: fp32, optimizer: adamw, grad_accumulation: 1}\n"
                "profile: shardlab\n")
            .empty());
}

TEST_CASE("plan prints a case's plan, and says what verify finds in a plan's text") {
  const Scratch scratch;
  const std::string file =
      scratch.write("case.yaml", "model: tiny-gpt\nmachine: hgx-h100-ndr\ndp: 2\nseq_len: 32\nmicro_batch: 1\n");
  const Output printed = shardlab_program(scratch, "plan " + file);
  INFO(printed.err);
  REQUIRE(printed.code == 0);
  const Output good = shardlab_program(scratch, "plan " + scratch.write("good.plan", printed.out));
  INFO(good.err);
  REQUIRE(good.code == 0);
  CHECK(good.out.find("verify finds nothing wrong\n") != std::string::npos);
  CHECK(good.out.find("  ranks: 2\n") != std::string::npos);

  std::string text = printed.out;  // without its first reduction
  const size_t reduce = text.find("all_reduce");
  REQUIRE(reduce != std::string::npos);
  text.erase(text.rfind('\n', reduce), text.find('\n', reduce) - text.rfind('\n', reduce));
  const Output bad = shardlab_program(scratch, "plan " + scratch.write("bad.plan", text));
  CHECK(bad.code == 3);
  CHECK(joined(bad.out).find("was written it holds f32 dp:partial micro:sum") != std::string::npos);
  const Rows findings = parse_csv(shardlab_program(scratch, "plan " + (scratch / "bad.plan") + " --format csv").out);
  REQUIRE(findings.size() > 1);
  std::vector<std::string> lines{""};  // from 1
  for (std::istringstream in(text); std::getline(in, lines.emplace_back());) {}
  for (size_t row = 1; row < findings.size();
       ++row) {  // each at a line that holds the label of its op, or the name that it speaks of
    const std::string op = cell(findings, row, "op"), finding = cell(findings, row, "finding");
    INFO(op << ": " << finding);
    const std::string& line = lines.at(std::stoul(cell(findings, row, "line")));
    const std::string word = line.substr(std::stoul(cell(findings, row, "column")) - 1);
    INFO(line);
    const std::string name = word.substr(0, word.find(' '));
    CHECK((op.empty() ? finding : op).find(name) != std::string::npos);
  }
  CHECK(shardlab_program(scratch, "plan " + scratch.write("torn.plan", text.substr(0, text.size() / 2))).code == 2);
  CHECK(shardlab_program(scratch, "plan " + (scratch / "good.plan") + " --set tp=2").code == 2);
}

TEST_CASE("an empty text is refused before anything runs; a case that does not fit is oom") {
  const Scratch scratch;
  scratch.write("text.txt", "");
  const std::string file = scratch.write("sweep.yaml", tiny_sweep("axes: {dp: [1]}\n"));
  const Output empty = shardlab_program(scratch, "run " + file + machine_option() + " --out " + (scratch / "empty"));
  INFO(empty.err);
  REQUIRE(empty.code == 2);
  REQUIRE(empty.err.find("text.txt") != std::string::npos);
  REQUIRE_FALSE(fs::exists(scratch / "empty/results.csv"));

  scratch.write("text.txt", some_text());
  const Output small = shardlab_program(
      scratch, "run " + file + machine_option() + " --set machine.device.memory=100000 --out " + (scratch / "small"));
  INFO(small.err);
  REQUIRE(small.code == 3);
  const Rows rows = parse_csv(slurp(scratch / "small/results.csv"));
  REQUIRE(cell(rows, 1, "status") == "oom");
}

TEST_CASE("validation scores exactly what is asked, or is refused before anything runs") {
  const Scratch scratch;
  scratch.write("text.txt", some_text());  // of which a tenth validates: some 60 sequences of 16 tokens
  const std::string one = tiny_sweep("include: [{name: only, dp: 1}]\n"), two = tiny_sweep("include: [{name: both, dp: 2}]\n");
  const auto run = [&](const std::string& sweep, const std::string& set, const std::string& out) {
    const std::string file = scratch.write("sweep.yaml", sweep);
    return shardlab_program(scratch, "run " + file + machine_option() + " --out " + (scratch / out) + " --set " + set);
  };
  struct Bad {
    std::string sequences, message, hint;
  };
  for (const Bad& bad :
       {Bad{"3", "measure.validate_sequences=3 of case `only`, whose steps take 4 sequences each", "to 4, or to 0 for none"},
        Bad{"6", "measure.validate_sequences=6 of case `only`", "to 4 or 8, or to 0 for none"},
        Bad{"4000", "the validation split of the data has", "give more text, shorten train.seq_len"}}) {
    const Output output = run(one, "measure.validate_sequences=" + bad.sequences, "refused");
    INFO(output.err);
    CHECK(output.code == 2);
    CHECK(output.err.find(bad.message) != std::string::npos);
    CHECK(output.err.find(bad.hint) != std::string::npos);
    CHECK_FALSE(fs::exists(scratch / "refused"));
  }
  const auto loss = [&](const std::string& sweep, const std::string& set, const std::string& out) {
    const Output output = run(sweep, set, out);
    INFO(output.err);
    REQUIRE(output.code == 0);
    return cell(parse_csv(slurp(scratch / (out + "/results.csv"))), 1, "val_loss");
  };
  CHECK(loss(one, "measure.validate_sequences=0", "none").empty());
  const std::string four = loss(one, "measure.validate_sequences=4 --set canonical=true", "four");
  CHECK_FALSE(four.empty());
  CHECK(loss(one, "measure.validate_sequences=8 --set canonical=true", "eight") != four);
  CHECK(loss(two, "measure.validate_sequences=4 --set canonical=true", "two") == four);
}

TEST_CASE("the validation step has an arena of its own, which must fit beside that of training") {
  const Scratch scratch;
  scratch.write("text.txt", some_text());
  const std::string file = scratch.write("sweep.yaml", tiny_sweep("include: [{name: only, dp: 1}]\n"));
  const auto run = [&](const std::string& out, const std::string& set) {
    const Output output = shardlab_program(
        scratch, "run " + file + machine_option() + " --out " + (scratch / out) + " --set measure.validate_sequences=" + set);
    INFO(output.err);
    return std::pair(output.code, parse_csv(slurp(scratch / (out + "/results.csv"))));
  };
  const auto [code, roomy] = run("roomy", "4");
  REQUIRE(code == 0);
  // Room for training and little more.
  const int64_t peak = std::stoll(cell(roomy, 1, "measured_peak_bytes"));
  const std::string tight = fmt::format(" --set machine.device.memory={}", peak + peak / 16);
  CHECK(run("trains", "0" + tight).first == 0);
  const auto [refused, rows] = run("refused", "4" + tight);
  CHECK(refused == 4);  // the case itself fits, and its prediction stands: what has no room is to measure it
  CHECK(cell(rows, 1, "status") == "oom");
  CHECK(cell(rows, 1, "reason").find("with the validation step's arena beside that of training") != std::string::npos);
  CHECK(cell(rows, 1, "reason").find("try measure.validate_sequences: 0") != std::string::npos);
  CHECK(cell(rows, 1, "measured_step_s").empty());
}

TEST_CASE("memory prints the contract's object, its parts add up, and 3 means that it does not fit") {
  const Scratch scratch;
  const Output output = shardlab_program(
      scratch, "memory --model gpt2 --machine a100-sxm4-80gb --devices 8 --pp 2 --tp 1 --seq-len 1024 --format json");
  INFO(output.err);
  REQUIRE(output.code == 0);
  const auto json = nlohmann::json::parse(output.out);
  for (const char* key : {"parameters", "devices", "layout", "stages", "peak", "capacity", "fits", "assumptions"})
    REQUIRE(json.contains(key));
  REQUIRE(json["parameters"] == 124439808);
  REQUIRE(json["devices"] == 8);
  REQUIRE(json["stages"].size() == 2);
  int64_t worst = 0;
  for (const auto& stage : json["stages"]) {
    int64_t sum = 0;
    for (const char* part : {"parameters", "gradients", "optimizer", "activations", "buffers", "workspace"})
      sum += stage[part].get<int64_t>();
    REQUIRE(sum == stage["peak"]);
    REQUIRE(stage["reserved"] >= stage["peak"]);
    worst = std::max(worst, stage["peak"].get<int64_t>());
  }
  REQUIRE(json["peak"] == worst);
  REQUIRE(shardlab_program(scratch, "memory --model llama-3.1-70b --machine a10-24gb --seq-len 4096").code == 3);
  REQUIRE(shardlab_program(scratch, "memory --model llama-3.1-70b --machine no-such-machine").code == 2);
  const Output idle = shardlab_program(scratch, "memory --model gpt2 --machine a100-sxm4-80gb --devices 8 --dp 3");
  REQUIRE(idle.code == 2);
  REQUIRE(idle.err.find("--devices 8 and a layout of dp*tp*pp*cp = 3 ranks") != std::string::npos);
}

TEST_CASE("memory of a machine whose memory nobody stated says that it does not know") {
  const Scratch scratch;
  const std::string words = "memory --model gpt2 --machine a10-24gb --seq-len 64 --set machine.device.memory=0";
  const Output output = shardlab_program(scratch, words + " --format json");
  INFO(output.err);
  REQUIRE(output.code == 0);
  const auto json = nlohmann::json::parse(output.out);
  REQUIRE(json["capacity"].is_null());
  REQUIRE(json["fits"].is_null());
  REQUIRE(json["assumptions"].back().get<std::string>().find("the memory of a10-24gb is not known") == 0);
  REQUIRE(shardlab_program(scratch, words).out.find("the memory of a10-24gb is not known") != std::string::npos);
}

TEST_CASE("every verb that prints has the four formats") {
  const Scratch scratch;
  const std::string file =
      scratch.write("a.yaml", "version: 1\nmodel: {preset: tiny-gpt}\nmachine: {preset: hgx-h100-ndr}\nseq_len: 64\ndp: 2\n");
  for (const std::string verb :
       {"model list", "model show gpt2", "machine list", "machine show hgx-h100-ndr", "strategies", "doctor", "plan FILE",
        "diff FILE FILE", "memory --model gpt2 --machine hgx-h100-ndr --seq-len 64"}) {
    std::string words = verb;
    for (size_t at; (at = words.find("FILE")) != std::string::npos;) words.replace(at, 4, file);
    INFO(words);
    REQUIRE(shardlab_program(scratch, words + " --format xml").code == 2);
    const int code = shardlab_program(scratch, words).code;
    REQUIRE(code == shardlab_program(scratch, words + " --format table").code);
    REQUIRE_NOTHROW(nlohmann::json::parse(shardlab_program(scratch, words + " --format json").out));
    REQUIRE(parse_csv(shardlab_program(scratch, words + " --format csv").out).size() > 1);
    REQUIRE(shardlab_program(scratch, words + " --format markdown").out.starts_with("| "));
  }
  const auto ops = nlohmann::json::parse(shardlab_program(scratch, "plan " + file + " --format json").out);
  REQUIRE(std::count_if(ops.begin(), ops.end(), [](const auto& op) { return op["kind"] == "all_reduce" && op["runs"] > 0; }) > 0);
  const auto constants = nlohmann::json::parse(shardlab_program(scratch, "machine show hgx-h100-ndr --format json").out);
  const auto link =
      std::find_if(constants.begin(), constants.end(), [](const auto& row) { return row["constant"] == "link_bandwidth"; });
  REQUIRE(link != constants.end());
  REQUIRE((*link)["value"] == 450e9);
  REQUIRE((*link)["unit"] == "B/s");
  REQUIRE((*link)["provenance"] == "datasheet");
  const std::string machines = shardlab_program(scratch, "machine list").out;
  REQUIRE(machines.find("450.0 GB/s") != std::string::npos);  // rates are decimal, capacities binary
  REQUIRE(machines.find("GiB/s") == std::string::npos);
}

TEST_CASE("plan and diff read case files") {
  const Scratch scratch;
  const std::string common =
      "version: 1\nmodel: {preset: gpt2}\nmachine: {preset: hgx-h100-ndr}\ntrain: {seq_len: 64, micro_batch: 1}\n";
  const std::string a = scratch.write("a.yaml", common + "layout: {dp: 2}\n"),
                    b = scratch.write("b.yaml", common + "layout: {dp: 2, zero: 1}\n");
  const Output plan = shardlab_program(scratch, "plan " + a);
  INFO(plan.err);
  REQUIRE(plan.code == 0);
  REQUIRE(plan.out.starts_with("shardlab plan 1\n"));
  REQUIRE(shardlab_program(scratch, "plan " + a + " --after nonsense").code == 2);
  const Output diff = shardlab_program(scratch, "diff " + a + " " + b);
  INFO(diff.err);
  REQUIRE(diff.code == 0);
  REQUIRE(diff.out.find("ops of kind reduce_scatter") != std::string::npos);
}

TEST_CASE("flags that are no numbers, or absurd ones, are refused with exit code 2") {
  const Scratch scratch;
  const std::string file =
      scratch.write("a.yaml", "version: 1\nmodel: {preset: tiny-gpt}\nmachine: {preset: hgx-h100-ndr}\nseq_len: 64\ndp: 2\n");
  const std::string sweep = scratch.write("s.yaml", "model: tiny-gpt\nmachine: hgx-h100-ndr\nseq_len: 64\naxes: {dp: [1]}\n");
  const std::string memory = "memory --model gpt2 --machine hgx-h100-ndr ";
  std::vector<std::string> lines;
  for (const char* value : {"0", "-1", "nan", "inf", "1e30", "two", "99999999999999999999"}) {
    for (const char* flag : {"--devices", "--dp", "--tp", "--pp", "--vpp", "--cp", "--ep", "--micro-batch", "--grad-accumulation",
                             "--seq-len", "--global-batch-tokens"})
      lines.push_back(fmt::format("{}{}={}", memory, flag, value));
    lines.push_back(fmt::format("run {} --jobs={}", sweep, value));
    lines.push_back(fmt::format("calibrate -o {} --scale={}", scratch / "m.yaml", value));
    lines.push_back(fmt::format("plan {} --set seq_len={}", file, value));
    lines.push_back(fmt::format("diff {0} {0} --set train.micro_batch={1}", file, value));
    lines.push_back(fmt::format("run {} --set measure.steps={}", sweep, value));
    if (std::string(value) != "0") {
      lines.push_back(fmt::format("explain {} --rows={}", scratch / "none", value));
      lines.push_back(memory + "--set seed=" + (std::string(value) == "1e30" ? "-2" : value));
    }
  }
  for (const char* words : {"--zero 4", "--zero -1", "--schedule fast", "--recompute some", "--precision fp12", "--offload disk",
                            "--sequence-parallel maybe", "--set", "--set tp", "--set =2", "--devices 3 --tp 2", "--tp 7"})
    lines.push_back(memory + words);
  for (const char* words : {"plan none.yaml", "diff none.yaml none.yaml", "explain none", "report none", "calibrate --backend tpu",
                            "calibrate -o /proc/none/m.yaml"})
    lines.emplace_back(words);
  for (const std::string& line : lines) {
    const Output output = shardlab_program(scratch, line);
    INFO(line << "\n" << output.out << output.err);
    CHECK(output.code == 2);
    CHECK(output.out.empty());
    CHECK_FALSE(output.err.empty());
  }
}

TEST_CASE("what needs another environment says so with exit code 6") {
  const Scratch scratch;
  const Output output = shardlab_program(scratch, "calibrate --backend cuda -o " + (scratch / "m.yaml"));
  REQUIRE(output.code == 6);
  REQUIRE(output.err.find("--backend cpu") != std::string::npos);
}

}  // namespace
}  // namespace shardlab::testing
