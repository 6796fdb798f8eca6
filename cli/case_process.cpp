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
#include <random>
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

/// A process of a case: which of how many, and where they meet; of a case in one process there is no server.
struct ChildPlace {
  int process = 0, processes = 1;
  std::string server, token;
  pid_t group = 0;  ///< the process group to join; 0: one of its own
};

/// Starts `program measure-case directory`, its output in a log of the case.
pid_t start_child(const std::string& program, const CaseFiles& files, bool traces, const ChildPlace& seat) {
  const std::string log_path = files.log(seat.process);
  std::vector<std::string> words{program, "measure-case", files.directory};
  if (!traces) words.emplace_back("--no-traces");
  if (!seat.server.empty())
    for (const std::string& word : {std::string("--group"), seat.server, std::string("--process"), std::to_string(seat.process),
                                    std::string("--processes"), std::to_string(seat.processes)})
      words.push_back(word);
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  const pid_t parent = getpid();
  const pid_t child = fork();
  if (child < 0) throw WorldError("cannot start a process for the case", "fewer cases at once, or more memory");
  if (child > 0) {
    setpgid(child, seat.group);  // here too: it must be a group before anybody ends that
    return child;
  }
  setpgid(0, seat.group);
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
  if (!seat.token.empty()) setenv(kGroupToken, seat.token.c_str(), 1);
  execv(program.c_str(), arguments.data());
  _exit(static_cast<int>(ExitCode::kEnvironment));
}

/// The processes of one case.
struct Children {
  std::vector<pid_t> processes;
  std::vector<int> statuses;  ///< of those that have ended, as waitpid(2) has them
  std::vector<bool> ended;
  bool all_ended() const { return std::ranges::find(ended, false) == ended.end(); }
  /// One has ended otherwise than well.
  bool any_failed() const {
    for (size_t i = 0; i < ended.size(); ++i)
      if (ended[i] && statuses[i] != 0) return true;
    return false;
  }
};

struct ChildEnd {
  bool timed_out = false, interrupted = false;
  std::string picture;  ///< of one that timed out: what it was at
};

/// Whether all children end before `seconds` have passed or, while they are waited for, `interrupted` is set. Where one fails the
/// others are waited for a little longer, since they end by themselves.
bool end_within(Children& children, double seconds, const std::atomic<bool>* interrupted) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::seconds kAfterFailure(5);
  auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  bool failed = false;
  while (true) {
    for (size_t i = 0; i < children.processes.size(); ++i)
      if (!children.ended[i]) children.ended[i] = waitpid(children.processes[i], &children.statuses[i], WNOHANG) != 0;
    if (children.all_ended()) return true;
    if (!failed && children.any_failed()) {
      failed = true;
      deadline = std::min(deadline, Clock::now() + kAfterFailure);
    }
    if (Clock::now() > deadline || (interrupted != nullptr && interrupted->load())) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

/// Ends what has not ended, whatever state it is in.
void kill_all(Children& children) {
  kill(-children.processes.front(), SIGKILL);
  for (size_t i = 0; i < children.processes.size(); ++i)
    if (!children.ended[i]) kill(children.processes[i], SIGKILL);
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

/// Waits for the children's end. Where they take too long one is asked what the ranks are at, and all are killed. A dead process
/// can stay a while: a debugger that holds one of its threads keeps it, and nobody waits for that.
ChildEnd wait_for(Children& children, double timeout_s, const CaseFiles& files, const std::atomic<bool>& interrupted) {
  constexpr double kAnswer_s = 3, kDeath_s = 2;
  ChildEnd end;
  if (end_within(children, timeout_s, &interrupted)) return end;
  end.interrupted = interrupted.load();
  end.timed_out = !end.interrupted && !children.any_failed();
  for (size_t i = 0; end.timed_out && end.picture.empty() && i < children.processes.size(); ++i) {
    if (children.ended[i]) continue;
    kill(children.processes[i], kAskForPicture);
    const bool ended = end_within(children, kAnswer_s, &interrupted);
    if (const auto picture = read_file(files.picture()); picture.ok()) end.picture = *picture;
    if (ended) return end;
    if (end.picture.empty())
      if (const std::string stopped = stopped_threads(children.processes[i]);
          !stopped.empty() && i + 1 == children.processes.size())
        end.picture = fmt::format("its process does not say what it is at; of its threads {} stand still, stopped", stopped);
  }
  kill_all(children);
  end_within(children, kDeath_s, nullptr);
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

std::string how_it_ended(int status, const std::string& log) {
  const std::string said = tail_of(log);
  std::string how = WIFSIGNALED(status)
                        ? fmt::format("the process was ended by signal {} ({})", WTERMSIG(status), strsignal(WTERMSIG(status)))
                        : fmt::format("the process ended with exit code {}", WEXITSTATUS(status));
  return said.empty() ? how + "; see " + log : how + ": " + said;
}

/// Why a case has not ended well: what its group says, with the processes that a signal ended; or the end of one that failed.
std::string why_failed(const Children& children, const std::optional<GroupFailure>& failure, const CaseFiles& files) {
  std::string signals;
  int first = -1;
  for (size_t i = 0; i < children.processes.size(); ++i) {
    const int status = children.statuses[i];
    if (first < 0 && status != 0) first = static_cast<int>(i);
    if (WIFSIGNALED(status))
      signals += fmt::format("; process {} was ended by signal {} ({})", i, WTERMSIG(status), strsignal(WTERMSIG(status)));
  }
  if (failure) return failure->message + signals + (failure->hint.empty() ? "" : "; " + failure->hint);
  return how_it_ended(children.statuses[static_cast<size_t>(std::max(first, 0))], files.log(std::max(first, 0)));
}

/// What nobody else knows.
std::string new_token() {
  std::random_device device;
  return fmt::format("{:08x}{:08x}{:08x}{:08x}", device(), device(), device(), device());
}

/// A plan that does not fit is out of memory, and one that does not verify is no illegal layout but a bug of ours.
CaseOutcome ended_by(CaseOutcome outcome, const Error& error) {
  return refused(std::move(outcome), error,
                 error.code == ExitCode::kNo    ? Status::kOom
                 : error.code == ExitCode::kBug ? Status::kFailed
                                                : Status::kRefused);
}

/// What measuring takes beyond training: the arena of the validation step, which the peak of a step does not have.
Result<void> validation_fits(const Case& config, const PlacedRun& training) {
  if (!validates(config)) return {};
  const auto validation = prepare_validation(config);
  if (!validation.ok()) return validation.error();
  return fits(config, training, &*validation);
}

}  // namespace

namespace {
bool is_shared_out(const Case& config) { return config.transport == TransportKind::kProcesses || config.transport == TransportKind::kTcp; }
}  // namespace

Result<int> processes_of(const Case& config, const ProcessShare& share) {
  if (!is_shared_out(config)) return 1;
  const int ranks = config.layout.world_size(), each = std::max(share.ranks_per_process, 1);
  const int processes = share.processes > 0 ? share.processes : std::max(ranks / each, 1);
  const bool even = ranks % processes == 0 && (share.ranks_per_process == 0 || processes * each == ranks);
  if (even) return processes;
  return Error{ExitCode::kUsage,
               share.ranks_per_process == 0
                   ? fmt::format("{} ranks in {} processes, which cannot have as many each", ranks, processes)
                   : fmt::format("{} ranks in {} processes of {} ranks", ranks, processes, each),
               "set -n and --ranks-per-process so that their product is dp * tp * pp * cp", ""};
}

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
  const auto processes = processes_of(outcome.config, share_);
  if (!processes.ok()) {
    outcome = refused(std::move(outcome), processes.error());
    return;
  }
  std::optional<ControlServer> server;
  ChildPlace seat{.processes = *processes, .server = {}, .token = {}};
  if (is_shared_out(outcome.config)) {
    seat.token = new_token();
    server.emplace(*processes, Endpoint(), seat.token);
    seat.server = to_string(server->endpoint());
  }
  Children children{{}, std::vector<int>(static_cast<size_t>(*processes)), std::vector<bool>(static_cast<size_t>(*processes))};
  for (; seat.process < *processes; ++seat.process) {
    children.processes.push_back(start_child(program_, files, traces_ != Traces::kNone, seat));
    seat.group = children.processes.front();
  }
  interrupt::set_case_group(children.processes.front());
  const ChildEnd end = wait_for(children, outcome.config.measure.timeout_s, files, interrupted_);
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
  if (children.any_failed() || !children.all_ended()) {
    outcome.reason = why_failed(children, server ? server->failure() : std::nullopt, files);
    return;
  }
  outcome.reason = how_it_ended(0, files.log());
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
  if (!chosen.ok()) return ended_by(std::move(outcome), chosen.error());
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
  if (!placed.ok()) return ended_by(std::move(outcome), placed.error());

  const CaseFiles files{directory_ + "/" + outcome.case_id};
  std::error_code failure;
  if (std::filesystem::is_symlink(files.directory, failure))
    throw WorldError(fmt::format("{} is a link: files of the case would be written elsewhere", files.directory), "remove the link");
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
      return ended_by(std::move(outcome), predicted.error());
  }
  if (const auto fit = fits(config, *placed); !fit.ok()) {
    if (!outcome.predicted) outcome.predicted = predict_bytes(*placed);
    return ended_by(std::move(outcome), fit.error());
  }
  if (mode == Mode::kSimulate) return outcome;
  if (const auto processes = processes_of(config, share_); !processes.ok()) return refused(std::move(outcome), processes.error());
  if (config.checkpoint.resume.empty())
    if (const auto timed = check_timed_steps(config, 0); !timed.ok()) return ended_by(std::move(outcome), timed.error());
  if (const auto fit = validation_fits(config, *placed); !fit.ok()) {
    if (!outcome.predicted) outcome.predicted = predict_bytes(*placed);
    return ended_by(std::move(outcome), fit.error());
  }
  if (const auto laid_out = lay_out_replay(config, files.directory); !laid_out.ok())
    return ended_by(std::move(outcome), laid_out.error());
  if (!std::exchange(machine_written_, true)) write_file_atomically(files.machine(), to_yaml(config.machine));
  measure(outcome, files.directory);
  return outcome;
}

}  // namespace shardlab::cli
