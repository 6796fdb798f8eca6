// Processes through the program: a transport as an axis, what cannot be shared out, and a case whose process dies.
#include <fmt/format.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <functional>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "cases/children.h"
#include "cases/pipeline.h"
#include "cases/restart.h"
#include "plan/base/files.h"
#include "reports/table.h"
#include "runtime/gloo/mesh.h"
#include "runtime/socket.h"
#include "tests/cli/program.h"
#include "tests/namespaces.h"
#include "tests/strategies/cases.h"
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

/// Gloo's library lies beside the program where it was built.
bool gloo_is_built() { return fs::exists(fs::path(testing::program_path()).parent_path() / kGlooFile); }

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
  const std::string file =
      sweep_of(scratch, "axes: {transport: [threads, processes, tcp" + std::string(gloo_is_built() ? ", gloo" : "") +
                            "]}\n"
                            "measure: {warmup: 1, steps: 2, repeat: 1, timeout: 1m, validate_sequences: 4}\n");
  const Output output = shardlab_program(
      scratch, fmt::format("run {} --machine-file {}/tests/cli/calibrated.yaml --mode both --ranks-per-process 2 --out {}", file,
                           testing::source_dir(), scratch / "out"));
  INFO(output.err);
  REQUIRE(output.code == 0);
  const Rows rows = parse_csv(slurp(scratch / "out/results.csv"));
  REQUIRE(rows.size() == (gloo_is_built() ? 5 : 4));
  for (const char* column :
       {"measured_peak_bytes", "predicted_peak_bytes", "measured_wire_bytes", "loss_first", "loss_last", "val_loss", "status"})
    for (size_t row = 2; row < rows.size(); ++row) {
      INFO(column << " of " << cell(rows, row, "transport"));
      CHECK_FALSE(cell(rows, 1, column).empty());
      CHECK(cell(rows, row, column) == cell(rows, 1, column));
    }
  CHECK(cell(rows, 1, "transport") == "threads");
  for (size_t row = 2; row < rows.size(); ++row) {
    const std::string folder = scratch / ("out/" + cell(rows, row, "case_id"));
    CHECK(is_there(folder + "/log.1.txt"));
    CHECK_FALSE(is_there(folder + "/log.2.txt"));
    CHECK(is_there(folder + "/measured.trace.jsonl.gz"));
  }
  CHECK(processes_with({"measure-case", scratch / "out"}).empty());
}

/// A port that nobody listens at.
int free_port() {
  Endpoint endpoint;
  const auto listener = listen_at(endpoint);
  REQUIRE(listener.ok());
  return endpoint.port;
}

/// The block of a document that begins with `first`.
std::string block_of(const std::string& document, const std::string& first) {
  const std::string text = slurp(testing::source_dir() + ("/" + document));
  const size_t begin = text.find(first);
  REQUIRE(begin != std::string::npos);
  return text.substr(begin, text.find("```", begin) - begin);
}

std::string replaced(std::string text, const std::string& what, const std::string& by) {
  const size_t at = text.find(what);
  INFO(what);
  REQUIRE(at != std::string::npos);
  return text.replace(at, what.size(), by);
}

TEST_CASE("processes that a shell has started share a sweep, as the document shows") {
  const Scratch scratch;
  const std::string file = sweep_of(scratch, "measure: {warmup: 1, steps: 2, repeat: 1, timeout: 1m}\n");
  REQUIRE(shardlab_program(scratch, "run " + file + machine_option() + "--out " + (scratch / "threads")).code == 0);
  std::string loop = block_of("docs/transports.md", "export WORLD_SIZE=4");
  loop = replaced(loop, "29500", std::to_string(free_port()));
  loop = replaced(loop, "SWEEP.yaml", file + machine_option());
  loop = replaced(loop, "runs/loop", scratch / "out");
  loop = replaced(loop, "shardlab launch", std::string(testing::program_path()) + " launch");
  const std::string script = scratch.write("loop.sh", "TMPDIR=" + (scratch / "tmp") + "\nexport TMPDIR\n" + loop);
  fs::create_directories(scratch / "tmp");
  REQUIRE(std::system(fmt::format("sh {} >{} 2>&1", script, scratch / "loop.txt").c_str()) == 0);
  INFO(slurp(scratch / "loop.txt"));
  const Rows rows = parse_csv(slurp(scratch / "out/results.csv"));
  REQUIRE(rows.size() == 2);
  INFO(cell(rows, 1, "reason"));
  CHECK(cell(rows, 1, "status") == "ok");
  CHECK(cell(rows, 1, "transport") == "tcp");
  const Rows threads = parse_csv(slurp(scratch / "threads/results.csv"));
  for (const char* column : {"measured_peak_bytes", "measured_wire_bytes", "loss_first", "loss_last"})
    CHECK(cell(rows, 1, column) == cell(threads, 1, column));
  const std::string folder = scratch / ("out/" + cell(rows, 1, "case_id"));
  CHECK(is_there(folder + "/log.3.txt"));
  CHECK(fs::is_empty(scratch / "tmp"));
  CHECK(processes_with({"measure-case", scratch / "out"}).empty());
}

TEST_CASE("a process of a job that dies ends the case of all") {
  const Scratch scratch;
  const std::string file = sweep_of(scratch, "measure: {warmup: 1, steps: 2, repeat: 1, timeout: 1m}\n");
  const std::string place = fmt::format("--world-size 2 --master-addr 127.0.0.1 --master-port {}", free_port());
  const auto part = [&](int rank, const std::string& before) {
    const std::string log = scratch / fmt::format("part{}.txt", rank);
    return std::async(std::launch::async, [=, &scratch] {
      return std::system(fmt::format("{} {} launch {} --rank {} run {}{}--out {} >{} 2>&1", before, testing::program_path(), place,
                                     rank, file, machine_option(), scratch / "out", log)
                             .c_str());
    });
  };
  // Every file that the second process could write is too large for it: a signal ends it.
  auto first = part(0, ""), second = part(1, "ulimit -f 0; ");
  CHECK(WEXITSTATUS(first.get()) == 4);
  CHECK(second.get() != 0);
  INFO(slurp(scratch / "part0.txt"));
  const std::string reason = cell(parse_csv(slurp(scratch / "out/results.csv")), 1, "reason");
  INFO(reason);
  CHECK(reason.find("process 1 of 2 has ended") != std::string::npos);
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
  CHECK(no_run.err.find("needs `run` or `comm` after its options") != std::string::npos);
  CHECK(launch("-n 0" + rest).code == 2);
  const Output both = launch("-n 2 --rank 0 --world-size 2" + rest);
  CHECK(both.code == 2);
  CHECK(both.err.find("-n with a place in a job") != std::string::npos);
}

TEST_CASE("doctor shows the place that each launcher gives") {
  const Scratch scratch;
  const auto place = [&](const std::string& variables) {
    const Output doctor = shardlab_program(scratch, "doctor --format csv", variables);
    const size_t at = doctor.out.find("\nplace in a job,");
    INFO(doctor.out);
    REQUIRE(at != std::string::npos);
    return doctor.out.substr(at + 1, doctor.out.find('\n', at + 1) - at - 1);
  };
  const auto shows = [&](const std::string& variables, const std::string& what) {
    INFO(variables);
    const std::string line = place(variables);
    INFO(line);
    CHECK(line.find("\"" + what + "\"") != std::string::npos);
  };
  shows("RANK=1 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=7", "process 1 of 2, first process at h:7, by torchrun (RANK)");
  shows("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2 MASTER_PORT=7",
        "process 1 of 2, local rank 1, first process at 127.0.0.1:7, by PMI (PMI_RANK)");
  shows(
      "SLURM_PROCID=3 SLURM_NTASKS=8 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_ID=0 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_STEP_NUM_NODES=2 "
      "SLURM_STEP_NODELIST=n[07-08] SLURM_STEP_RESV_PORTS=12003-12006",
      "process 3 of 4, local rank 1, node 1 of 2, first process at n07:12003, by Slurm (SLURM_PROCID)");
  shows("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=2 MASTER_PORT=7",
        "process 0 of 2, first process at 127.0.0.1:7, by Open MPI (OMPI_COMM_WORLD_RANK)");
  // A shell within an allocation is in no step.
  CHECK(place("SLURM_JOB_ID=7 SLURM_NTASKS=8 SLURM_PROCID=0").find("none: started by hand") != std::string::npos);
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

namespace {

/// Waits for the manifest of `steps` steps in the one case of a run directory; its path, or nothing after a minute.
std::string manifest_of(const std::string& out, int steps) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (std::chrono::steady_clock::now() < deadline) {
    std::error_code none;
    for (const auto& entry : fs::directory_iterator(out, none))
      if (const std::string path = entry.path() / fmt::format("checkpoints/step-{:08}.manifest", steps); is_there(path))
        return path;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return {};
}

/// Sends a signal to a process of the case that a run directory has, which must be there within a minute. -1: the only one of threads.
void signal_process(const std::string& out, int process, int signal) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  std::vector<std::string> words{"measure-case", out};
  if (process >= 0) words.push_back(std::string("--process") + std::string(1, char(0)) + std::to_string(process));
  std::vector<pid_t> victim;
  while (victim.empty() && std::chrono::steady_clock::now() < deadline) victim = processes_with(words);
  REQUIRE(victim.size() == 1);
  kill(victim.front(), signal);
}

void kill_process(const std::string& out, int process) { signal_process(out, process, SIGKILL); }

/// A sweep of four data-parallel ranks with one sequence each, `steps` steps of which two are timed, saved every eight.
constexpr int kSteps = 400, kEvery = 8;
std::string four_ranks(const Scratch& scratch) {
  return sweep_of(scratch, fmt::format("measure: {{warmup: {}, steps: 2, repeat: 1, timeout: 2m}}\n", kSteps - 2)) +
         fmt::format("{}--set dp=4 --set tp=1 --set checkpoint.save_every={} ", machine_option(), kEvery);
}

/// "12" of "... from step 12 with ..."; 0 where there is none.
int restart_step(const std::string& reason) {
  const size_t at = reason.find("restarted from step ");
  return at == std::string::npos ? 0 : std::stoi(reason.substr(at + std::string("restarted from step ").size()));
}

}  // namespace

TEST_CASE("a case whose process is killed goes on from its newest checkpoint, with fewer data-parallel ranks and the same bits") {
  const Scratch scratch;
  const std::string sweep = four_ranks(scratch);
  REQUIRE(shardlab_program(scratch, "run " + sweep + "--transport threads --out " + (scratch / "whole")).code == 0);
  const std::string whole = slurp(manifest_of(scratch / "whole", kSteps));
  REQUIRE(whole.size() > 1000);
  for (const std::string transport : {"processes", "tcp"}) {
    INFO(transport);
    const std::string out = scratch / transport;
    std::future<Output> run = std::async(std::launch::async, [&] {
      return shardlab_program(
          scratch, fmt::format("launch -n 4 --restarts 2 --elastic run {}--transport {} --out {}", sweep, transport, out));
    });
    REQUIRE(!manifest_of(out, kEvery).empty());
    kill_process(out, 2);
    const Output output = run.get();
    INFO(output.err);
    CHECK(output.code == 0);
    const Rows rows = parse_csv(slurp(out + "/results.csv"));
    REQUIRE(rows.size() == 2);
    const std::string reason = cell(rows, 1, "reason");
    INFO(reason);
    CHECK(cell(rows, 1, "status") == "ok");
    CHECK(cell(rows, 1, "dp") == "2");
    CHECK(cell(rows, 1, "grad_accumulation") == "2");
    CHECK(cell(rows, 1, "global_batch_tokens") == "64");
    CHECK(reason.find("process 2 of 4 has ended: rank 2 stands still at stream ") == 0);
    const int step = restart_step(reason);
    CHECK(step >= kEvery);
    CHECK(reason.find(fmt::format("restarted from step {} with dp 2 and grad_accumulation 2 in place of 4 and 1", step)) !=
          std::string::npos);
    CHECK(processes_with({"measure-case", out}).empty());
    // The bits of a run of two ranks that begins at that checkpoint, and in canonical mode of four that were never stopped.
    const std::string ended = slurp(manifest_of(out, kSteps)), from = manifest_of(out, step),
                      again = scratch / (transport + "-again");
    REQUIRE(shardlab_program(scratch, fmt::format("run {}--set dp=2 --set grad_accumulation=2 --set checkpoint.resume={} --set "
                                                  "measure.warmup={} --transport {} --out {}",
                                                  sweep, from, kSteps - step - 2, transport, again))
                .code == 0);
    CHECK(ended == slurp(manifest_of(again, kSteps)));
    CHECK(ended == whole);
    const Rows same = parse_csv(slurp(again + "/results.csv"));
    for (const char* column : {"loss_last", "measured_peak_bytes", "measured_wire_bytes"})
      CHECK(cell(rows, 1, column) == cell(same, 1, column));
  }
}

TEST_CASE(
    "a case restarts as often as was asked: with its own ranks, with ever fewer, and not where the batch cannot be shared out") {
  const Scratch scratch;
  const std::string sweep = four_ranks(scratch);
  const auto struck = [&](const std::string& name, const std::string& flags,
                          const std::function<void(const std::string&)>& strike) {
    const std::string out = scratch / name;
    std::future<Output> run = std::async(std::launch::async, [&] {
      return shardlab_program(scratch, fmt::format("launch -n 4 {} run {} --out {}", flags, sweep, out));
    });
    strike(out);
    const Output output = run.get();
    INFO(output.err);
    const Rows rows = parse_csv(slurp(out + "/results.csv"));
    CHECK(output.code == (cell(rows, 1, "status") == "ok" ? 0 : 4));
    CHECK(processes_with({"measure-case", out}).empty());
    return rows;
  };
  const auto once = [](int process) {
    return [process](const std::string& out) {
      REQUIRE(!manifest_of(out, kEvery).empty());
      kill_process(out, process);
    };
  };
  const Rows kept = struck("kept", "--restarts 1", once(3));
  CHECK(cell(kept, 1, "status") == "ok");
  CHECK(cell(kept, 1, "dp") == "4");
  const std::string whole = slurp(manifest_of(scratch / "kept", kSteps));
  const Rows twice = struck("twice", "--restarts 2 --elastic", [&](const std::string& out) {
    once(1)(out);
    // The second attempt has two processes: its second one begins when the first attempt's fourth has gone.
    const auto fourth = std::string("--process") + std::string(1, char(0)) + "3";
    while (!processes_with({"measure-case", out, fourth}).empty()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    kill_process(out, 1);
  });
  INFO(cell(twice, 1, "reason"));
  CHECK(cell(twice, 1, "status") == "ok");
  CHECK(cell(twice, 1, "dp") == "1");
  CHECK(cell(twice, 1, "grad_accumulation") == "4");
  CHECK(slurp(manifest_of(scratch / "twice", kSteps)) == whole);
  const Rows refused = struck("refused", "--restarts 2 --elastic --least-dp 3", once(0));
  CHECK(cell(refused, 1, "status") == "failed");
  CHECK(cell(refused, 1, "reason")
            .find("; not restarted: no fewer than 4 data-parallel ranks can go on with 3 ranks: dp 3 does not divide "
                  "the 4 micro-batches of a step; choose grad_accumulation") != std::string::npos);
  CHECK(shardlab_program(scratch, "launch -n 4 --elastic run " + sweep).code == 2);
  CHECK(shardlab_program(scratch, "launch -n 4 --restarts 1 --least-dp 2 run " + sweep).code == 2);
  CHECK(shardlab_program(scratch, "launch --restarts 1 comm -n 2").code == 2);
  CHECK(shardlab_program(scratch, "launch --rank 0 --world-size 2 --master-addr 127.0.0.1 --restarts 1 run " + sweep).code == 2);
}

TEST_CASE("a case goes on from its newest checkpoint where its run directory is given by a relative path, or not at all") {
  const Scratch scratch;
  const std::string sweep = four_ranks(scratch);
  for (const auto& [option, out] : {std::pair<std::string, std::string>{"--out relative/out", scratch / "relative/out"},
                                    std::pair<std::string, std::string>{"", scratch / "runs/wires"}}) {
    INFO(option);
    std::future<Output> run = std::async(std::launch::async, [&, words = option] {
      return shardlab_program(scratch, fmt::format("launch -n 4 --restarts 1 run {} {}", sweep, words),
                              "cd " + (scratch / "") + " &&");
    });
    REQUIRE(!manifest_of(out, kEvery).empty());
    // The words of the processes are relative as the option is.
    kill_process(out.substr((scratch / "").size()), 2);
    const Output output = run.get();
    INFO(output.err);
    CHECK(output.code == 0);
    const Rows rows = parse_csv(slurp(out + "/results.csv"));
    const std::string reason = cell(rows, 1, "reason");
    INFO(reason);
    CHECK(cell(rows, 1, "status") == "ok");
    CHECK(restart_step(reason) >= kEvery);
    CHECK(!manifest_of(out, kSteps).empty());
  }
}

TEST_CASE("a case whose process is stopped goes on when its time is over, and one that is slow does not") {
  const Scratch scratch;
  const auto sweep = [&](const std::string& timeout) {
    return sweep_of(scratch, fmt::format("measure: {{warmup: {}, steps: 2, repeat: 1, timeout: {}}}\n", kSteps - 2, timeout)) +
           fmt::format("{}--set dp=4 --set tp=1 --set checkpoint.save_every={} ", machine_option(), kEvery);
  };
  const std::string whole = scratch / "whole";
  REQUIRE(shardlab_program(scratch, "run " + sweep("2m") + "--out " + whole).code == 0);
  struct Attempted {
    std::string words, dp, still;
    int process;
  };
  for (const auto& [words, dp, still, process] :
       {Attempted{"launch -n 4 --restarts 3 --elastic run", "2", "process 2 stands still", 2},
        Attempted{"launch -n 1 --restarts 1 run", "4", "process 0 stands still", -1}}) {
    INFO(words);
    const std::string out = scratch / (dp + "-ranks");
    std::future<Output> run = std::async(std::launch::async, [&, text = words] {
      return shardlab_program(scratch, fmt::format("{} {} --out {}", text, sweep("20s"), out));
    });
    REQUIRE(!manifest_of(out, kEvery).empty());
    signal_process(out, process, SIGSTOP);
    const Output output = run.get();
    INFO(output.err);
    CHECK(output.code == 0);
    const Rows rows = parse_csv(slurp(out + "/results.csv"));
    const std::string reason = cell(rows, 1, "reason");
    INFO(reason);
    CHECK(cell(rows, 1, "status") == "ok");
    CHECK(cell(rows, 1, "dp") == dp);
    CHECK(reason.starts_with("not done after 20 s, " + still + ": "));
    CHECK(restart_step(reason) >= kEvery);
    CHECK(slurp(manifest_of(out, kSteps)) == slurp(manifest_of(whole, kSteps)));
    CHECK(processes_with({"measure-case", out}).empty());
  }
  const std::string slow = scratch / "slow";
  CHECK(shardlab_program(scratch,
                         fmt::format("launch -n 4 --restarts 3 run {} --set measure.warmup=1000000 --out {}", sweep("5s"), slow))
            .code == 4);
  const Rows rows = parse_csv(slurp(slow + "/results.csv"));
  INFO(cell(rows, 1, "reason"));
  CHECK(cell(rows, 1, "status") == "timeout");
  CHECK(cell(rows, 1, "reason").starts_with("not done after 5 s: "));
  CHECK(cell(rows, 1, "reason").find("restarted") == std::string::npos);
}

TEST_CASE("children that are lost: ended from outside, stopped or silent, and not those that end or answer after another's error") {
  const Scratch scratch;
  const auto lost_of = [&](const std::string& one, const std::string& other) {
    return std::async(std::launch::async, [&scratch, one, other] {
      Children children;
      for (const std::string& script : {one, other}) {
        const pid_t group = children.processes.empty() ? 0 : children.processes.front();
        children.add(start_process({"sh", "-c", script}, "", group));
      }
      const std::atomic<bool> interrupted = false;
      const ChildEnd end = wait_for(children, 60, CaseFiles{scratch / "case"}, interrupted);
      CHECK_FALSE(end.timed_out);
      CHECK(children.all_ended());
      return std::pair(end.taken, end.still);
    });
  };
  // Each child has the five seconds that others have after a failure, and three to answer.
  const std::string answers = "trap 'exit 4' USR1; while :; do sleep 0.05; done";
  auto answered = lost_of("exit 4", answers), stopped = lost_of("exit 4", "kill -STOP $$"),
       silent = lost_of("exit 4", "trap '' USR1; while :; do sleep 0.05; done"), killed = lost_of("kill -KILL $$", answers),
       fault = lost_of("kill -ABRT $$", "kill -STOP $$"), refused = lost_of("exit 3", "exit 4");
  using Still = std::vector<int>;
  CHECK(answered.get() == std::pair(0, Still{}));
  CHECK(stopped.get() == std::pair(1, Still{1}));
  CHECK(silent.get() == std::pair(1, Still{1}));
  CHECK(killed.get() == std::pair(1, Still{}));
  CHECK(fault.get() == std::pair(0, Still{1}));
  CHECK(refused.get() == std::pair(0, Still{}));

  // Over time, the first is stopped, and the other ends without a word: the stopped thread is named all the same.
  Children children;
  children.add(start_process({"sh", "-c", "kill -STOP $$"}, "", 0));
  children.add(start_process({"sh", "-c", answers}, "", children.processes.front()));
  const std::atomic<bool> interrupted = false;
  const ChildEnd end = wait_for(children, 0.5, CaseFiles{scratch / "case"}, interrupted);
  CHECK(end.timed_out);
  CHECK(end.picture.empty());
  CHECK(end.stopped == "process 0 does not say what it is at; of its threads `sh` stand still, stopped");
  CHECK(end.still == Still{0});
}

TEST_CASE("fewer data-parallel ranks: the most that are left, that share out the micro-batches, in whole processes") {
  Case c = tiny_case();
  c.layout.dp = 6, c.layout.tp = 2, c.train.grad_accumulation = 2;
  const auto fewer = [&](int ranks, int each, int least = 1) { return with_fewer_ranks(c, ranks, each, least); };
  REQUIRE(check(c).ok());
  // 12 micro-batches of 6 pairs: 11 ranks leave 5 pairs, of which 4 have 3 micro-batches each.
  auto found = fewer(11, 1);
  REQUIRE(found.ok());
  CHECK((found->layout.dp == 4 && found->train.grad_accumulation == 3));
  CHECK(found->sequences_per_step() == c.sequences_per_step());
  // Processes of four ranks: two are left, and take four pairs.
  found = fewer(8, 4);
  REQUIRE(found.ok());
  CHECK(found->layout.dp == 4);
  found = fewer(4, 4);
  REQUIRE(found.ok());
  CHECK((found->layout.dp == 2 && found->train.grad_accumulation == 6));
  const auto refused = fewer(11, 1, 5);
  REQUIRE(!refused.ok());
  CHECK(refused.error().message ==
        "no fewer than 6 data-parallel ranks can go on with 11 ranks: dp 5 does not divide the 12 micro-batches of a step");
  CHECK(fewer(1, 1).error().message.ends_with("tp * pp * cp takes 2 ranks"));
  CHECK(fewer(11, 12).error().message.find("dp 4 has 8 ranks, which are no whole processes of 12") != std::string::npos);
}

TEST_CASE("a restarted run ends with the step that it would have ended with, and times whole blocks at its end") {
  Measure whole;
  whole.warmup = 10, whole.steps = 5, whole.repeat = 3;
  const auto is = [&](int64_t left, int64_t warmup, int64_t steps, int64_t repeat) {
    const Measure m = with_steps_left(whole, left);
    INFO(left << " left");
    CHECK((m.warmup == warmup && m.steps == steps && m.repeat == repeat));
    CHECK(m.warmup + m.steps * m.repeat == left);
  };
  is(25, 10, 5, 3);
  is(20, 5, 5, 3);
  is(15, 0, 5, 3);
  is(13, 3, 5, 2);
  is(5, 0, 5, 1);
  is(4, 0, 4, 1);
  is(1, 0, 1, 1);
}

}  // namespace shardlab::testing
