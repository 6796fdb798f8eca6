// Runs that were cut short, and directories that two want: nothing finished is lost, and what is refused is said.
#include <fcntl.h>
#include <fmt/format.h>
#include <sqlite3.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "plan/base/files.h"
#include "reports/table.h"
#include "tests/cli/program.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

namespace fs = std::filesystem;

std::string tiny_sweep(const std::string& more) {
  return "version: 1\nname: tiny\nmode: simulate\nmodel: {preset: tiny-gpt, layers: 2}\nmachine: h100-sxm5-80gb\n"
         "train: {seq_len: 64, global_batch_tokens: 512}\n" +
         more;
}

/// In a process that dies, without warning, in the middle of a commit.
void die_in_a_commit(const std::string& store) {
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    sqlite3* handle = nullptr;
    sqlite3_open(store.c_str(), &handle);
    for (const char* statement : {"PRAGMA cache_size = 2", "BEGIN IMMEDIATE", "UPDATE ops SET label = label || 'x'",
                                  "UPDATE cases SET reason = 'changed, never committed'",
                                  "INSERT INTO losses SELECT case_id || 'z', position, 0.0, NULL FROM ops"})
      sqlite3_exec(handle, statement, nullptr, nullptr, nullptr);
    kill(getpid(), SIGKILL);
  }
  waitpid(child, nullptr, 0);
}

TEST_CASE("a store whose process died in the middle of a commit is rolled back, reported and resumed") {
  const Scratch scratch;
  const std::string file = scratch.write("sweep.yaml", tiny_sweep("axes: {seed: {range: [1, 8]}}\n"));
  const std::string out = scratch / "out";
  REQUIRE(shardlab_program(scratch, "run " + file + " --out " + out).code == 0);
  const std::string before = slurp(out + "/results.csv");
  for (const std::string& command : {"report " + out + " --format csv", "run " + file + " --resume --out " + out}) {
    die_in_a_commit(out + "/results.sqlite");
    REQUIRE(fs::file_size(out + "/results.sqlite-journal") > 0);
    const Output output = shardlab_program(scratch, command);
    INFO(command << "\n" << output.err);
    CHECK(output.code == 0);
    CHECK(output.out.find("never committed") == std::string::npos);
    CHECK_FALSE(is_there(out + "/results.sqlite-journal"));
  }
  CHECK(slurp(out + "/results.csv") == before);
}

TEST_CASE("a run that died before its first commit begins anew, with --resume and without") {
  const Scratch scratch;
  const std::string file = scratch.write("sweep.yaml", tiny_sweep(""));
  for (const std::string how : {"", " --resume"}) {
    const std::string out = scratch / (how.empty() ? "anew" : "resumed");
    fs::create_directories(out);
    scratch.write(fs::path(out).filename().string() + "/results.sqlite", "");
    const Output report = shardlab_program(scratch, "report " + out);
    CHECK(report.code == 2);
    CHECK(report.err.find("holds no results yet") != std::string::npos);
    const Output run = shardlab_program(scratch, "run " + file + how + " --out " + out);
    INFO(run.err);
    CHECK(run.code == 0);
    CHECK(cell(parse_csv(slurp(out + "/results.csv")), 1, "status") == "ok");
  }
}

TEST_CASE("a store that was cut short is said to be damaged, and nothing is written into it") {
  const Scratch scratch;
  const std::string file = scratch.write("sweep.yaml", tiny_sweep("axes: {seed: {range: [1, 8]}}\n"));
  const std::string out = scratch / "out", store = out + "/results.sqlite";
  REQUIRE(shardlab_program(scratch, "run " + file + " --out " + out).code == 0);
  fs::resize_file(store, fs::file_size(store) / 2);
  const std::string before = slurp(store);
  for (const std::string& command : {"report " + out, "run " + file + " --resume --out " + out}) {
    const Output output = shardlab_program(scratch, command);
    INFO(output.err);
    CHECK(output.code == 6);
    CHECK(output.err.find("results.csv beside it may still be whole") != std::string::npos);
  }
  CHECK(slurp(store) == before);
}

TEST_CASE("a directory that another run writes is refused, with that run's process, until the process ends") {
  const Scratch scratch;
  const std::string file = scratch.write("sweep.yaml", tiny_sweep(""));
  const std::string out = scratch / "out";
  fs::create_directories(out);
  int ready[2];
  REQUIRE(pipe(ready) == 0);
  const pid_t other = fork();
  REQUIRE(other >= 0);
  if (other == 0) {
    const int lock = open((out + "/run.lock").c_str(), O_RDWR | O_CREAT, 0600);
    const std::string holder = fmt::format("process {} on here, shardlab run other.yaml\n", getpid());
    if (flock(lock, LOCK_EX) != 0 || write(lock, holder.data(), holder.size()) < 0 || write(ready[1], "x", 1) != 1) _exit(1);
    pause();
    _exit(0);
  }
  char byte;
  REQUIRE(read(ready[0], &byte, 1) == 1);
  for (const std::string how : {"", " --resume"}) {
    const Output refused = shardlab_program(scratch, "run " + file + how + " --out " + out);
    INFO(refused.err);
    CHECK(refused.code == 2);
    CHECK(refused.err.find(fmt::format("is written by another run: process {} on here, shardlab run other.yaml", other)) !=
          std::string::npos);
    CHECK_FALSE(is_there(out + "/results.sqlite"));
  }
  kill(other, SIGKILL);
  waitpid(other, nullptr, 0);
  const Output taken = shardlab_program(scratch, "run " + file + " --out " + out);
  INFO(taken.err);
  CHECK(taken.code == 0);
  CHECK(slurp(out + "/run.lock").find("shardlab run " + file) != std::string::npos);
}

TEST_CASE("temporary files of killed processes are gone after the next start") {
  const Scratch scratch;
  const std::string file = scratch.write("sweep.yaml", tiny_sweep(""));
  const std::string out = scratch / "out";
  REQUIRE(shardlab_program(scratch, "run " + file + " --out " + out).code == 0);
  const std::string id = cell(parse_csv(slurp(out + "/results.csv")), 1, "case_id");
  fs::create_directories(out + "/" + id + "/checkpoints");
  for (const std::string& left :
       {std::string("out/results.csv"), "out/" + id + "/plan.txt", "out/" + id + "/checkpoints/step-00000001.tensors"})
    scratch.write(left + ".new-1-0", "half");
  REQUIRE(shardlab_program(scratch, "run " + file + " --resume --out " + out).code == 0);
  for (const auto& entry : fs::recursive_directory_iterator(out)) CHECK(entry.path().string().find(".new-") == std::string::npos);
}

TEST_CASE("a log takes the place of a planted link, and is not written through one") {
  const Scratch scratch;
  std::string text;
  for (int i = 0; i < 200; ++i) text += fmt::format("line {} of a text that a small model can learn from\n", i % 17);
  scratch.write("text.txt", text);
  const std::string file = scratch.write(
      "sweep.yaml",
      "version: 1\nname: tiny\nmode: measure\nmodel: {preset: tiny-gpt, layers: 2, hidden: 64}\nmachine: {local: true}\n"
      "data: {text: text.txt}\ntrain: {seq_len: 32, global_batch_tokens: 128, micro_batch: 2}\n"
      "measure: {warmup: 1, steps: 1, repeat: 1, timeout: 5m}\n");
  const std::string out = scratch / "out", victim = scratch.write("victim", "precious");
  const std::string command =
      fmt::format("run {} --machine-file {}/tests/cli/local.yaml --out {}", file, testing::source_dir(), out);
  REQUIRE(shardlab_program(scratch, command).code == 0);
  const std::string log = out + "/" + cell(parse_csv(slurp(out + "/results.csv")), 1, "case_id") + "/log.txt";
  REQUIRE(fs::is_regular_file(log));
  fs::remove(out + "/results.sqlite");
  fs::remove(log);
  fs::create_symlink(victim, log);
  REQUIRE(shardlab_program(scratch, command).code == 0);
  CHECK(slurp(victim) == "precious");
  CHECK(fs::symlink_status(log).type() == fs::file_type::regular);
}

TEST_CASE("a hundred thousand points are counted in a gibibyte, and a billion are refused") {
  const Scratch scratch;
  const std::string bounded = "ulimit -v 1048576 &&";
  const std::string many = scratch.write("many.yaml", tiny_sweep("axes: {seed: {range: [1, 100000]}}\n"));
  const Output counted = shardlab_program(scratch, "run " + many + " --dry-run", bounded);
  INFO(counted.err);
  CHECK(counted.code == 0);
  CHECK(counted.out ==
        "tiny: 100000 combinations\n100000 points: 100000 to run, 0 refused\n"
        "some of those to run may still be refused, or not fit, once they are planned\n");
  const std::string more = scratch.write("more.yaml", tiny_sweep("axes: {seed: {range: [1, 1000000000]}}\n"));
  const Output refused = shardlab_program(scratch, "run " + more + " --dry-run", bounded);
  CHECK(refused.code == 2);
  CHECK(refused.err.find("takes 999999999 steps, and the axes of a sweep have at most 1000000 values") != std::string::npos);
}

}  // namespace
}  // namespace shardlab::testing
