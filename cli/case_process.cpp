#include "cli/case_process.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>
#include <utility>

#include "cli/common.h"
#include "cli/interrupt.h"
#include "cli/namespaces.h"
#include "cli/pipeline.h"
#include "cli/recorded_case.h"
#include "plan/base/pending_file.h"
#include "plan/base/world_error.h"
#include "plan/text.h"
#include "profiler/trace_file.h"
#include "reports/store.h"
#include "simulator/interpreter/machine_yaml.h"

namespace shardlab::cli {
namespace {

/// Starts `program measure-case directory` in a process group of its own, its output in the case's log.
pid_t start_child(const std::string& program, const CaseFiles& files, bool traces) {
  const std::string log_path = files.log();
  const pid_t parent = getpid();
  const pid_t child = fork();
  if (child < 0) throw WorldError("cannot start a process for the case", "fewer cases at once, or more memory");
  if (child > 0) {
    setpgid(child, child);  // here too: it must be a group before anybody ends that
    return child;
  }
  setpgid(0, 0);
  sigset_t asked;  // blocked from the first moment: see CaseWatch (cli/measure_case.cpp)
  sigemptyset(&asked);
  sigaddset(&asked, kAskForPicture);
  sigprocmask(SIG_BLOCK, &asked, nullptr);
  prctl(PR_SET_PDEATHSIG, SIGKILL);  // a case does not outlive the run that wanted it, however that ended
  if (getppid() != parent) _exit(static_cast<int>(ExitCode::kEnvironment));
  // A new file: what is under its name, a link to another one too, is replaced and not written into.
  unlink(log_path.c_str());
  const int log = open(log_path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, 0644);
  if (log >= 0) {
    dup2(log, STDOUT_FILENO);
    dup2(log, STDERR_FILENO);
  }
  execl(program.c_str(), program.c_str(), "measure-case", files.directory.c_str(), traces ? nullptr : "--no-traces",
        static_cast<char*>(nullptr));
  _exit(static_cast<int>(ExitCode::kEnvironment));
}

struct ChildEnd {
  bool timed_out = false, interrupted = false;
  std::string picture;  ///< of one that timed out: what it was at
  int status = 0;
};

/// Whether the child ends before `seconds` have passed or, while it is waited for, `interrupted` is set.
bool ends_within(pid_t child, double seconds, int& status, const std::atomic<bool>* interrupted) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::duration<double>(seconds);
  while (waitpid(child, &status, WNOHANG) == 0) {
    if (Clock::now() > deadline || (interrupted != nullptr && interrupted->load())) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return true;
}

/// Threads of a process that a debugger or a signal has stopped, by name; empty: none.
std::string stopped_threads(pid_t process) {
  std::string names;
  std::error_code gone;
  for (const auto& thread : std::filesystem::directory_iterator(fmt::format("/proc/{}/task", process), gone)) {
    std::ifstream file(thread.path() / "stat");
    std::string text;
    std::getline(file, text);
    const size_t open = text.find('('), close = text.rfind(')');  // "12 (name) t ..."
    if (open == std::string::npos || close == std::string::npos || close + 2 >= text.size()) continue;
    if (text[close + 2] != 't' && text[close + 2] != 'T') continue;
    names += fmt::format("{}`{}`", names.empty() ? "" : ", ", text.substr(open + 1, close - open - 1));
  }
  return names;
}

/// Waits for the child's end. One that takes too long is asked what it is at, and killed. A dead process can stay a while: a
/// debugger that holds one of its threads keeps it, and nobody waits for that.
ChildEnd wait_for(pid_t child, double timeout_s, const CaseFiles& files, const std::atomic<bool>& interrupted) {
  constexpr double kAnswer_s = 3, kDeath_s = 2;
  ChildEnd end;
  if (ends_within(child, timeout_s, end.status, &interrupted)) return end;
  end.interrupted = interrupted.load();
  end.timed_out = !end.interrupted;
  if (end.timed_out) {
    kill(child, kAskForPicture);
    const bool ended = ends_within(child, kAnswer_s, end.status, &interrupted);
    if (const auto picture = read_file(files.picture()); picture.ok()) end.picture = *picture;
    if (ended) return end;
    if (end.picture.empty())
      if (const std::string stopped = stopped_threads(child); !stopped.empty())
        end.picture = fmt::format("its process does not say what it is at; of its threads {} stand still, stopped", stopped);
  }
  kill(-child, SIGKILL);
  ends_within(child, kDeath_s, end.status, nullptr);
  return end;
}

/// The last lines of a log, which hold the error.
std::string tail_of(const std::string& path) {
  std::ifstream file(path);
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);)
    if (!line.empty()) lines.push_back(line);
  std::string text;
  for (size_t i = lines.size() > 3 ? lines.size() - 3 : 0; i < lines.size(); ++i) text += (text.empty() ? "" : " | ") + lines[i];
  return text;
}

std::string how_it_ended(int status, const CaseFiles& files) {
  const std::string said = tail_of(files.log());
  std::string how = WIFSIGNALED(status)
                        ? fmt::format("the process was ended by signal {} ({})", WTERMSIG(status), strsignal(WTERMSIG(status)))
                        : fmt::format("the process ended with exit code {}", WEXITSTATUS(status));
  return said.empty() ? how + "; see " + files.log() : how + ": " + said;
}

CaseOutcome refused(CaseOutcome outcome, const Error& error) {
  // A plan that does not verify is no illegal layout but a bug of ours.
  outcome.status = error.code == ExitCode::kNo ? Status::kOom : error.code == ExitCode::kBug ? Status::kFailed : Status::kRefused;
  outcome.reason = error.hint.empty() ? error.message : error.message + "; " + error.hint;
  return outcome;
}

/// What measuring takes beyond training: the arena of the validation step, which the peak of a step does not have.
Result<void> validation_fits(const Case& config, const PlacedRun& training) {
  if (!validates(config)) return {};
  const auto validation = prepare_validation(config);
  if (!validation.ok()) return validation.error();
  return fits(config, training, &*validation);
}

}  // namespace

/// The logs that the child repeats lie beside its case; those of a run before are taken away.
Result<void> ProcessCaseRunner::lay_out_replay(const Case& config, const std::string& directory) const {
  const CaseFiles files{directory};
  const bool repeats = !replay_.empty() && config.layout.parameter_server.staleness >= 0;
  for (int server = 0; server < config.layout.parameter_server.servers; ++server) {
    std::error_code failure;
    std::filesystem::remove(files.replay(server), failure);
    if (!repeats) continue;
    const std::string from = CaseFiles{replay_ + "/" + case_id(config)}.arrivals(server);
    std::filesystem::copy_file(from, files.replay(server), failure);
    if (failure)
      return Error{ExitCode::kUsage, fmt::format("the arrivals to be replayed cannot be read: {}: {}", from, failure.message()),
                   "give --replay the directory of a run that measured this very case", ""};
  }
  return {};
}

void ProcessCaseRunner::measure(CaseOutcome& outcome, const std::string& directory) const {
  const CaseFiles files{directory};
  Store::remove(files.outcome());
  std::error_code ignored;
  std::filesystem::remove(files.picture(), ignored);
  const pid_t child = start_child(program_, files, traces_ != Traces::kNone);
  interrupt::set_case_group(child);
  const ChildEnd end = wait_for(child, outcome.config.measure.timeout_s, files, interrupted_);
  interrupt::set_case_group(0);
  if (end.timed_out) {
    outcome.status = Status::kTimeout;
    outcome.reason = fmt::format("not done after {} s{}{}; raise measure.timeout, or see {}", outcome.config.measure.timeout_s,
                                 end.picture.empty() ? "" : ": ", end.picture, files.log());
    return;
  }
  outcome.status = Status::kFailed;
  if (end.interrupted) {
    outcome.reason = "interrupted";
    return;
  }
  outcome.reason = how_it_ended(end.status, files);
  if (!WIFEXITED(end.status) || WEXITSTATUS(end.status) != 0) return;
  const auto store = Store::open_existing(files.outcome());
  if (!store.ok()) return;
  const auto measured = store->outcomes();
  if (measured.empty()) return;
  outcome.status = measured.front().status;
  outcome.reason = measured.front().reason;
  outcome.measured = measured.front().measured;
  outcome.ops = measured.front().ops;
}

CaseOutcome ProcessCaseRunner::run(const sweeps::Point& point, Mode mode) {
  const Case& config = point.config;
  CaseOutcome outcome;
  outcome.case_id = case_id(config);
  outcome.config = config;
  outcome.parameters = parameter_count(config.model);
  const auto chosen = decide(config);
  if (!chosen.ok()) return refused(std::move(outcome), chosen.error());
  outcome.config = *chosen;
  return run_decided(std::move(outcome), mode);
}

/// Of the timeline also what each op took, and its trace.
Result<void> ProcessCaseRunner::predict_into(CaseOutcome& outcome, const PlacedRun& placed, Mode mode,
                                             const std::string& directory) const {
  if (resolution_ == Resolution::kSegments) {
    const auto figures = predict_case_by_segments(outcome.config, placed);
    if (!figures.ok()) return figures.error();
    outcome.predicted = *figures;
    return {};
  }
  const auto predicted = predict_case(outcome.config, placed);
  if (!predicted.ok()) return predicted.error();
  outcome.predicted = predicted->figures;
  outcome.ops = compare_ops(placed, &predicted->trace, nullptr);
  const bool kept = traces_ == Traces::kAll || (traces_ == Traces::kMeasured && mode == Mode::kBoth);
  if (kept && outcome.config.layout.world_size() <= kTraceRanks)
    write_trace_lines(CaseFiles{directory}.predicted(), *placed.plan, placed.programs, predicted->trace);
  return {};
}

CaseOutcome ProcessCaseRunner::run_decided(CaseOutcome outcome, Mode mode) {
  const Case& config = outcome.config;
  const auto placed = prepare(config);
  if (!placed.ok()) return refused(std::move(outcome), placed.error());

  const CaseFiles files{directory_ + "/" + outcome.case_id};
  std::error_code failure;
  std::filesystem::create_directories(files.directory, failure);
  if (failure)
    throw WorldError(fmt::format("{}: {}", files.directory, failure.message()), "give the case a folder that can be made");
  // Of an earlier attempt: they would not be of the plan that is written here.
  for (const std::string& trace : {files.predicted(), files.measured(), files.chrome()}) std::filesystem::remove(trace, failure);
  write_file_atomically(files.config(), to_yaml(config));
  write_file_atomically(files.plan(), print(*placed->plan));
  if (placed->warm_up) write_file_atomically(files.warm_up_plan(), print(*placed->warm_up->plan));
  if (mode != Mode::kMeasure) {
    if (const auto predicted = predict_into(outcome, *placed, mode, files.directory); !predicted.ok())
      return refused(std::move(outcome), predicted.error());
  }
  if (const auto fit = fits(config, *placed); !fit.ok()) {
    if (!outcome.predicted) outcome.predicted = predict_bytes(*placed);
    return refused(std::move(outcome), fit.error());
  }
  if (mode == Mode::kSimulate) return outcome;
  if (config.checkpoint.resume.empty())
    if (const auto timed = check_timed_steps(config, 0); !timed.ok()) return refused(std::move(outcome), timed.error());
  if (const auto fit = validation_fits(config, *placed); !fit.ok()) {
    if (!outcome.predicted) outcome.predicted = predict_bytes(*placed);
    return refused(std::move(outcome), fit.error());
  }
  if (const auto laid_out = lay_out_replay(config, files.directory); !laid_out.ok())
    return refused(std::move(outcome), laid_out.error());
  if (!std::exchange(machine_written_, true)) write_file_atomically(files.machine(), to_yaml(config.machine));
  measure(outcome, files.directory);
  return outcome;
}

}  // namespace shardlab::cli
