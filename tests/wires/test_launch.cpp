// Processes through the program: a transport as an axis, what cannot be shared out, and a case whose process dies.
#include <fmt/format.h>

#include <chrono>
#include <csignal>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "plan/base/files.h"
#include "reports/table.h"
#include "tests/cli/program.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

namespace fs = std::filesystem;

std::string sweep_of(const Scratch& scratch, const std::string& rest) {
  std::string text;
  for (int i = 0; i < 200; ++i) text += fmt::format("line {} of a text that a small model can learn from\n", i % 17);
  scratch.write("text.txt", text);
  return scratch.write("sweep.yaml",
                       "version: 1\nname: wires\nmode: measure\n"
                       "model: {inline: {family: gpt, layers: 2, hidden: 32, heads: 4, ffn: 64, vocab: 256, max_positions: 32}}\n"
                       "machine: {local: true}\ndata: {text: text.txt}\nexecution: {canonical: true}\n"
                       "train: {seq_len: 16, global_batch_tokens: 64}\nlayout: {dp: 2, tp: 2, zero: 1}\n" +
                           rest);
}

std::string machine_option() { return fmt::format(" --machine-file {}/tests/cli/local.yaml ", testing::source_dir()); }

/// Numbers of the processes whose command line has all these words.
std::vector<pid_t> processes_with(const std::vector<std::string>& words) {
  std::vector<pid_t> found;
  for (const auto& entry : fs::directory_iterator("/proc")) {
    const std::string name = entry.path().filename().string();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    const std::string line = slurp(entry.path() / "cmdline");
    if (std::ranges::all_of(words, [&](const std::string& word) { return line.find(word) != std::string::npos; }))
      found.push_back(std::stoi(name));
  }
  return found;
}

}  // namespace

TEST_CASE("a transport is an axis of a sweep, and changes neither losses nor bytes") {
  const Scratch scratch;
  const std::string file = sweep_of(scratch,
                                    "axes: {transport: [threads, processes, tcp]}\n"
                                    "measure: {warmup: 1, steps: 2, repeat: 1, timeout: 1m, validate_sequences: 4}\n");
  const Output output =
      shardlab_program(scratch, "run " + file + machine_option() + "--ranks-per-process 2 --out " + (scratch / "out"));
  INFO(output.err);
  REQUIRE(output.code == 0);
  const Rows rows = parse_csv(slurp(scratch / "out/results.csv"));
  REQUIRE(rows.size() == 4);
  for (const char* column :
       {"measured_peak_bytes", "predicted_peak_bytes", "measured_wire_bytes", "loss_first", "loss_last", "val_loss", "status"})
    for (const size_t row : {2, 3}) {
      INFO(column << " of " << cell(rows, row, "transport"));
      CHECK(cell(rows, row, column) == cell(rows, 1, column));
    }
  CHECK(cell(rows, 1, "transport") == "threads");
  for (const size_t row : {2, 3}) {
    const std::string folder = scratch / ("out/" + cell(rows, row, "case_id"));
    CHECK(is_there(folder + "/log.1.txt"));
    CHECK_FALSE(is_there(folder + "/log.2.txt"));
    CHECK(is_there(folder + "/measured.trace.jsonl.gz"));
  }
  CHECK(processes_with({"measure-case", scratch / "out"}).empty());
}

TEST_CASE("what cannot be launched is refused with what can") {
  const Scratch scratch;
  const std::string file = sweep_of(scratch, "measure: {warmup: 1, steps: 1, repeat: 1, timeout: 1m}\n");
  const auto launch = [&](const std::string& words) { return shardlab_program(scratch, "launch " + words); };
  const std::string rest = " run " + file + machine_option() + "--out " + (scratch / "out");
  CHECK(launch("-n 3" + rest).code == 3);
  CHECK(cell(parse_csv(slurp(scratch / "out/results.csv")), 1, "reason") ==
        "4 ranks in 3 processes, which cannot have as many each; set -n and --ranks-per-process so that their product is dp * tp * "
        "pp "
        "* cp");
  const Output no_run = launch("-n 2 memory --model gpt2");
  CHECK(no_run.code == 2);
  CHECK(no_run.err.find("only `run` has ranks to launch") != std::string::npos);
  CHECK(launch("-n 0" + rest).code == 2);
}

TEST_CASE("a case whose process is killed ends, says who it was and at what, and leaves no process behind") {
  const Scratch scratch;
  const std::string file = sweep_of(scratch, "measure: {warmup: 1000000, steps: 2, repeat: 1, timeout: 2m}\n");
  for (const std::string transport : {"processes", "tcp"}) {
    INFO(transport);
    const std::string out = scratch / transport;
    const std::string command =
        "launch -n 4 run " + file + machine_option() + "--transport " + transport + " --set checkpoint.save_every=1 --out " + out;
    std::future<Output> run = std::async(std::launch::async, [&] { return shardlab_program(scratch, command); });
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    bool trains = false;  // a saved step tells
    while (!trains && std::chrono::steady_clock::now() < deadline) {
      std::error_code none;
      for (const auto& entry : fs::directory_iterator(out, none))
        trains = trains || is_there(entry.path() / "checkpoints/step-00000003.manifest");
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    REQUIRE(trains);
    const auto victim = processes_with({"measure-case", out, std::string("--process") + std::string(1, char(0)) + "2"});
    REQUIRE(victim.size() == 1);
    kill(victim.front(), SIGKILL);
    const Output output = run.get();
    INFO(output.err);
    CHECK(output.code == 4);
    const Rows rows = parse_csv(slurp(out + "/results.csv"));
    const std::string reason = cell(rows, 1, "reason");
    INFO(reason);
    CHECK(cell(rows, 1, "status") == "failed");
    CHECK(reason.find("process 2 of 4 has ended: rank 2 stands still at stream ") == 0);
    CHECK(reason.find("; process 2 was ended by signal 9 (Killed)") != std::string::npos);
    CHECK(processes_with({"measure-case", out}).empty());
  }
}

}  // namespace shardlab::testing
