// What takes too long is named, and what is told to end ends, with everything that it started.
#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <pty.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <future>
#include <thread>

#include "plan/base/files.h"
#include "reports/table.h"
#include "runtime/crew.h"
#include "runtime/watch.h"
#include "tests/cli/program.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

namespace fs = std::filesystem;

std::string machine_option() { return fmt::format(" --machine-file {}/tests/cli/local.yaml ", testing::source_dir()); }

/// A sweep that trains for hours unless its time-out ends it.
std::string endless_sweep(const Scratch& scratch, const std::string& timeout) {
  std::string text;
  for (int i = 0; i < 200; ++i) text += fmt::format("line {} of a text that a small model can learn from\n", i % 17);
  scratch.write("text.txt", text);
  return scratch.write("endless.yaml",
                       "version: 1\nname: endless\nmode: measure\nmodel: {preset: tiny-gpt, layers: 2, hidden: 64}\n"
                       "machine: {local: true}\ndata: {text: text.txt}\n"
                       "train: {seq_len: 32, global_batch_tokens: 256, micro_batch: 2}\nlayout: {dp: 2}\n"
                       "measure: {warmup: 1000000, steps: 2, repeat: 1, timeout: " +
                           timeout + "}\n");
}

/// Numbers of the processes whose command line has both words.
std::vector<pid_t> processes_with(const std::string& one, const std::string& other) {
  std::vector<pid_t> found;
  for (const auto& entry : fs::directory_iterator("/proc")) {
    const std::string name = entry.path().filename().string();
    if (name.find_first_not_of("0123456789") != std::string::npos || name == std::to_string(getpid())) continue;
    const std::string line = slurp(entry.path() / "cmdline");
    if (line.find(one) != std::string::npos && line.find(other) != std::string::npos) found.push_back(std::stoi(name));
  }
  return found;
}

/// The thread of that name; 0: none.
pid_t thread_of(pid_t process, const std::string& name) {
  std::error_code gone;
  for (const auto& entry : fs::directory_iterator(fmt::format("/proc/{}/task", process), gone))
    if (slurp(entry.path() / "comm") == name + "\n") return std::stoi(entry.path().filename().string());
  return 0;
}

/// Asks again until it is so, or for a minute.
template <class Condition>
bool becomes(const Condition& so) {
  for (int i = 0; i < 6000; ++i) {
    if (so()) return true;
    usleep(10'000);
  }
  return false;
}

TEST_CASE("of ranks of which one stands still, that one is named, its op, and what the others wait for") {
  const SteadyClock clock;
  ThreadScheduler scheduler(clock, 3, 1);
  Crew crew(scheduler, 300, [](const TaskSeat& seat) { return fmt::format("op #{}", seat.instruction()); });
  for (int rank = 0; rank < 3; ++rank) crew.add(rank, 0);
  Counter offered;
  std::atomic<bool> stands{true}, moves{true};
  crew.start([&](Task& task) {
    task.set_instruction(10 + task.rank());
    if (task.rank() != 1) return task.wait(offered, 1, {WaitCause::Kind::kMessage, 1, 0});
    while (stands) {}
    while (moves) task.set_instruction(11);
  });
  Watch watch;
  watch.begin("trains");
  watch.begin_step(6, 20);
  watch.enter(crew);
  REQUIRE(becomes([&] {
    return crew.tasks()[0]->cause().kind == WaitCause::Kind::kMessage && crew.tasks()[1]->instruction() == 11 &&
           crew.tasks()[2]->cause().kind == WaitCause::Kind::kMessage;
  }));
  CHECK(
      watch.picture(0.01) ==
      "the process trains, step 7 of 20: rank 1 stands still at op #11, its thread runs; rank 0: op #10 waits for rank 1 to offer "
      "its part; rank 2: op #12 waits for rank 1 to offer its part");
  stands = false;
  REQUIRE(becomes([&] { return watch.picture(0.01) == "the process trains, step 7 of 20, and no rank stands still"; }));
  moves = false;
  offered.advance();
  crew.join();
  watch.leave(crew);
  CHECK(watch.picture(0) == "the process trains, step 7 of 20");
}

TEST_CASE("ranks that all wait are said to") {
  const SteadyClock clock;
  ThreadScheduler scheduler(clock, 2, 1);
  Crew crew(scheduler, 300, [](const TaskSeat& seat) { return fmt::format("op #{}", seat.instruction()); });
  for (int rank = 0; rank < 2; ++rank) crew.add(rank, 0);
  Counter never;
  crew.start([&](Task& task) {
    task.set_instruction(3);
    task.wait(never, 1, {WaitCause::Kind::kMessage, 1 - task.rank(), 0});
  });
  Watch watch;
  watch.enter(crew);
  REQUIRE(becomes([&] {
    return crew.tasks()[0]->cause().kind != WaitCause::Kind::kNothing && crew.tasks()[1]->cause().kind != WaitCause::Kind::kNothing;
  }));
  CHECK(watch.picture(0.01) ==
        "the process begins: every rank waits; rank 1: op #3 waits for rank 0 to offer its part; rank 0: op #3 "
        "waits for rank 1 to offer its part");
  never.advance();
  crew.join();
  watch.leave(crew);
}

TEST_CASE("a case that takes too long says how far it has come") {
  const Scratch scratch;
  const Output run =
      shardlab_program(scratch, "run " + endless_sweep(scratch, "8s") + machine_option() + " --out " + (scratch / "out"));
  INFO(run.err);
  CHECK(run.code == 4);
  const Rows rows = parse_csv(slurp(scratch / "out/results.csv"));
  CHECK(cell(rows, 1, "status") == "timeout");
  const std::string reason = cell(rows, 1, "reason");
  CHECK(reason.find("not done after 8 s: the process trains, step ") == 0);
  CHECK(reason.find("of 1000002, and no rank stands still; raise measure.timeout") != std::string::npos);
}

TEST_CASE("a rank whose thread is stopped is named, with its op, and the run goes on without waiting for it") {
  const Scratch scratch;
  const std::string command =
      "run " + endless_sweep(scratch, "10s") + machine_option() + " --set checkpoint.save_every=1 --out " + (scratch / "out");
  std::future<Output> run = std::async(std::launch::async, [&] { return shardlab_program(scratch, command); });
  pid_t thread = 0;
  REQUIRE(becomes([&] {
    for (const pid_t process : processes_with("measure-case", scratch / "out")) thread = thread_of(process, "rank 1.0");
    bool trains = false;  // a saved step tells
    std::error_code none;
    for (const auto& entry : fs::directory_iterator(scratch / "out", none))
      trains = trains || is_there(entry.path() / "checkpoints/step-00000003.manifest");
    return thread != 0 && trains;
  }));
  int frozen[2];
  REQUIRE(pipe(frozen) == 0);
  const pid_t freezer = fork();
  REQUIRE(freezer >= 0);
  if (freezer == 0) {
    int status = 0;
    const bool seized = ptrace(PTRACE_SEIZE, thread, 0, 0) == 0 && ptrace(PTRACE_INTERRUPT, thread, 0, 0) == 0;
    if (seized) waitpid(thread, &status, __WALL);
    (void)!write(frozen[1], seized ? "y" : "n", 1);
    pause();
    _exit(0);
  }
  char answer = 'n';
  REQUIRE(read(frozen[0], &answer, 1) == 1);
  const Output output = run.get();
  kill(freezer, SIGKILL);
  waitpid(freezer, nullptr, 0);
  if (answer != 'y') {
    WARN("this machine lets no process stop another's threads: not tried");
    return;
  }
  INFO(output.err);
  CHECK(output.code == 4);
  const std::string reason = cell(parse_csv(slurp(scratch / "out/results.csv")), 1, "reason");
  INFO(reason);
  CHECK(reason.find("rank 1 stands still at stream ") != std::string::npos);
  CHECK(reason.find("its thread is stopped; ") != std::string::npos);
  // The other rank waits for it in an op, or has done its part of the step.
  CHECK((reason.find("rank 0: stream ") != std::string::npos ||
         reason.find("rank 0: has done its part of the step") != std::string::npos));
}

/// Starts `shardlab words...` with its error output in a file.
pid_t start(const Scratch& scratch, const std::vector<std::string>& words) {
  const pid_t child = fork();
  if (child != 0) return child;
  const int errors = open((scratch / "err").c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), null = open("/dev/null", O_WRONLY);
  dup2(errors, STDERR_FILENO);
  dup2(null, STDOUT_FILENO);
  std::vector<char*> arguments{const_cast<char*>(testing::program_path().c_str())};
  for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  execv(arguments[0], arguments.data());
  _exit(127);
}

/// Whether the process is the program, and no copy of this test any more, and has its handlers.
bool catches_sigterm(pid_t process) {
  std::error_code gone;
  if (fs::read_symlink(fmt::format("/proc/{}/exe", process), gone) != fs::canonical(testing::program_path())) return false;
  const std::string status = slurp(fmt::format("/proc/{}/status", process));
  const size_t at = status.find("SigCgt:");
  return at != std::string::npos && (std::stoull(status.substr(at + 7), nullptr, 16) >> (SIGTERM - 1) & 1) != 0;
}

int exit_code_of(pid_t process) {
  int status = 0;
  waitpid(process, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status) + 1000;
}

TEST_CASE("SIGTERM and SIGINT end a measured run with 130, the resuming command and its case process") {
  const Scratch scratch;
  const std::string file = endless_sweep(scratch, "10m"), out = scratch / "out";
  const std::string machine = testing::source_dir() + "/tests/cli/local.yaml";
  std::vector<std::string> words{"run", file, "--machine-file", machine, "--out", out};
  for (const int signal : {SIGTERM, SIGINT}) {
    const pid_t driver = start(scratch, words);
    REQUIRE(becomes([&] { return !processes_with("measure-case", out).empty(); }));
    kill(driver, signal);
    CHECK(exit_code_of(driver) == 130);
    CHECK(slurp(scratch / "err")
              .find("interrupted; to go on: shardlab run " + file + " --machine-file " + machine + " --out " + out +
                    " --resume\n") != std::string::npos);
    CHECK(becomes([&] { return processes_with("measure-case", out).empty(); }));
    if (signal == SIGTERM) words.push_back("--resume");
  }
}

TEST_CASE("a signal ends every other verb with 130 and the command") {
  const Scratch scratch;
  const std::vector<std::vector<std::string>> verbs = {
      {"calibrate", "--scale", "100", "-o", scratch / "machine.yaml"},
      {"search", "--model", "llama-3.1-405b", "--machine", "hgx-h100-ndr", "--devices", "512,1024,2048,4096,8192,16384",
       "--global-batch-tokens", "16Mi", "--top", "3000"},
      {"run",
       scratch.write("many.yaml",
                     "version: 1\nname: many\nmode: simulate\nmodel: tiny-gpt\nmachine: h100-sxm5-80gb\n"
                     "train: {seq_len: 64, global_batch_tokens: 512}\naxes: {seed: {range: [1, 20000]}}\n"),
       "--out", scratch / "out"}};
  for (const auto& words : verbs) {
    const pid_t process = start(scratch, words);
    REQUIRE(becomes([&] { return catches_sigterm(process); }));
    kill(process, SIGTERM);
    CHECK(exit_code_of(process) == 130);
    INFO(slurp(scratch / "err"));
    CHECK(slurp(scratch / "err").find("interrupted; to go on: shardlab " + words[0]) != std::string::npos);
  }
  CHECK_FALSE(is_there(scratch / "machine.yaml"));
}

/// What the program writes to its terminal until it says `wanted`, or its end.
std::string read_until(int terminal, const std::string& wanted) {
  std::string text;
  std::array<char, 4096> buffer;
  while (text.find(wanted) == std::string::npos) {
    const ssize_t n = read(terminal, buffer.data(), buffer.size());
    if (n <= 0) break;  // the program has ended
    text.append(buffer.data(), static_cast<size_t>(n));
  }
  return text;
}

/// All that the program still writes, until it has ended. The other end of the terminal stays open here: what stands in a terminal that
/// nobody has open may be lost.
std::string read_to_end(int terminal, pid_t program) {
  const int other_end = open(ptsname(terminal), O_RDWR | O_NOCTTY);
  REQUIRE(other_end >= 0);
  std::string text;
  std::array<char, 4096> buffer;
  for (bool ended = false;;) {
    pollfd waiting{terminal, POLLIN, 0};
    if (poll(&waiting, 1, 20) > 0) {
      const ssize_t n = read(terminal, buffer.data(), buffer.size());
      REQUIRE(n > 0);
      text.append(buffer.data(), static_cast<size_t>(n));
      continue;
    }
    if (ended) break;
    siginfo_t info{};
    ended = waitid(P_PID, static_cast<id_t>(program), &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == program;
  }
  close(other_end);
  return text;
}

TEST_CASE("a signal ends a screen with 130, the command of the layout that was reached, and the terminal as it was") {
  for (const bool typed : {false, true}) {
    const winsize size{40, 120, 0, 0};
    int terminal = -1;
    const pid_t program = forkpty(&terminal, nullptr, nullptr, &size);
    REQUIRE(program >= 0);
    if (program == 0) {
      setenv("TERM", "xterm", 1);
      execl(testing::program_path().c_str(), "shardlab", "memory", "--model", "gpt2", "--machine", "h100-sxm5-80gb",
            "--interactive", static_cast<char*>(nullptr));
      _exit(127);
    }
    CHECK(read_until(terminal, "gpt2").find("\x1b[?1049h") != std::string::npos);  // the other screen
    if (typed)
      REQUIRE(write(terminal, "\x03", 1) == 1);  // Ctrl-C
    else
      kill(program, SIGTERM);
    const std::string end = read_to_end(terminal, program);
    CHECK(exit_code_of(program) == 130);
    close(terminal);
    INFO(end);
    const size_t left = end.find("\x1b[?1049l"), told = end.find("interrupted; to go on: shardlab memory --model gpt2 --machine ");
    CHECK(left != std::string::npos);
    CHECK(told != std::string::npos);
    CHECK(left < told);
    CHECK(end.find("--interactive", told) != std::string::npos);
  }
}

}  // namespace
}  // namespace shardlab::testing
