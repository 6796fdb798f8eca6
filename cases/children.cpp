#include "cases/children.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <sstream>
#include <thread>

#include "cases/case_process.h"
#include "cases/namespaces.h"
#include "cases/pipeline.h"
#include "plan/base/files.h"
#include "plan/base/world_error.h"

namespace shardlab::cases {

namespace {

/// In a child: a program by its path, or by its name where there is no path.
[[noreturn]] void become(const std::vector<char*>& arguments) {
  execvp(arguments.front(), arguments.data());
  fmt::print(stderr, "{} cannot be started: {}\n", arguments.front(), std::strerror(errno));
  std::fflush(stderr);
  _exit(static_cast<int>(ExitCode::kEnvironment));
}

}  // namespace

std::vector<std::string> launched_by(const std::string& launcher, int processes, const std::vector<std::string>& words) {
  std::istringstream from(launcher);
  std::vector<std::string> all{std::istream_iterator<std::string>(from), {}};
  all.insert(all.end(), {"-n", std::to_string(processes)});
  all.insert(all.end(), words.begin(), words.end());
  return all;
}

pid_t start_child(const std::string& program, const CaseFiles& files, bool traces, const ChildPlace& place) {
  const std::string log_path = files.log(place.process);
  const bool launches = !place.launcher.empty();
  std::vector<std::string> words = place.launcher;
  words.insert(words.end(), {program, "measure-case", files.directory});
  if (!traces) words.emplace_back("--no-traces");
  if (!place.server.empty())
    for (const std::string& word :
         {std::string("--group"), place.server, std::string("--process"), std::to_string(launches ? kOwnNumber : place.process),
          std::string("--processes"), std::to_string(place.processes)})
      words.push_back(word);
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  const pid_t parent = getpid();
  const pid_t child = fork();
  if (child < 0) throw WorldError("cannot start a process for the case", "fewer cases at once, or more memory");
  if (child > 0) {
    setpgid(child, place.group);  // here too: it must be a group before anybody ends that
    return child;
  }
  setpgid(0, place.group);
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
  if (!place.token.empty()) setenv(kGroupToken, place.token.c_str(), 1);
  become(arguments);
}

pid_t start_process(const std::vector<std::string>& words, const std::string& token, pid_t group) {
  std::vector<char*> arguments;
  for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  const pid_t parent = getpid();
  const pid_t child = fork();
  if (child < 0) throw WorldError("cannot start a process", "fewer processes, or more memory");
  if (child > 0) {
    setpgid(child, group);
    return child;
  }
  setpgid(0, group);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(static_cast<int>(ExitCode::kEnvironment));
  setenv(kGroupToken, token.c_str(), 1);
  become(arguments);
}

std::string new_token() {
  std::random_device device;
  return fmt::format("{:08x}{:08x}{:08x}{:08x}", device(), device(), device(), device());
}

void Children::add(pid_t process) {
  processes.push_back(process);
  statuses.push_back(0);
  ended.push_back(false);
}

bool Children::all_ended() const { return std::ranges::find(ended, false) == ended.end(); }

bool Children::any_failed() const {
  for (size_t i = 0; i < ended.size(); ++i)
    if (ended[i] && statuses[i] != 0) return true;
  return false;
}

namespace {

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

}  // namespace

bool was_taken(int status) {
  if (!WIFSIGNALED(status)) return false;
  const int signal = WTERMSIG(status);
  return signal != SIGABRT && signal != SIGSEGV && signal != SIGBUS && signal != SIGFPE && signal != SIGILL;
}

namespace {

bool any_fault(const Children& children) {
  for (size_t i = 0; i < children.processes.size(); ++i)
    if (children.ended[i] && WIFSIGNALED(children.statuses[i]) && !was_taken(children.statuses[i])) return true;
  return false;
}

/// Asks the children that have not ended and were not asked what they are at, which ends those that can answer, within `seconds`.
void ask_others(Children& children, const std::vector<bool>& asked, double seconds, const std::atomic<bool>& interrupted) {
  bool any = false;
  for (size_t i = 0; i < children.processes.size(); ++i) {
    if (children.ended[i] || asked[i]) continue;
    kill(children.processes[i], kAskForPicture);
    any = true;
  }
  if (any) end_within(children, seconds, &interrupted);
}

}  // namespace

ChildEnd wait_for(Children& children, double timeout_s, const CaseFiles& files, const std::atomic<bool>& interrupted) {
  constexpr double kAnswer_s = 3, kDeath_s = 2;
  ChildEnd end;
  const bool ended = end_within(children, timeout_s, &interrupted);
  for (size_t i = 0; i < children.processes.size(); ++i)
    if (children.ended[i] && was_taken(children.statuses[i])) ++end.taken;
  if (ended) return end;
  end.interrupted = interrupted.load();
  end.timed_out = !end.interrupted && !children.any_failed();
  const bool fault = any_fault(children);
  std::vector<std::string> stopped;
  for (size_t i = 0; i < children.processes.size(); ++i)
    stopped.push_back(children.ended[i] ? "" : stopped_threads(children.processes[i]));
  std::vector<bool> asked(children.processes.size());
  for (size_t i = 0; end.timed_out && end.picture.empty() && i < children.processes.size(); ++i) {
    if (children.ended[i]) continue;
    asked[i] = true;
    kill(children.processes[i], kAskForPicture);
    end_within(children, kAnswer_s, &interrupted);
    if (const auto picture = read_file(files.picture()); picture.ok()) end.picture = *picture;
  }
  for (size_t i = 0; end.stopped.empty() && i < stopped.size(); ++i)
    if (!stopped[i].empty())
      end.stopped = fmt::format("{} does not say what it is at; of its threads {} stand still, stopped",
                                stopped.size() == 1 ? "its process" : fmt::format("process {}", i), stopped[i]);
  if (!end.interrupted) {
    ask_others(children, asked, kAnswer_s, interrupted);
    for (size_t i = 0; i < children.processes.size(); ++i)
      if (!stopped[i].empty() || !children.ended[i]) end.still.push_back(static_cast<int>(i));
    if (!fault) end.taken += static_cast<int>(end.still.size());
  }
  if (children.all_ended()) return end;
  kill_all(children);
  end_within(children, kDeath_s, nullptr);
  return end;
}

bool wait_for_end(Children& children, double timeout_s) {
  if (end_within(children, timeout_s, nullptr)) return true;
  constexpr double kDeath_s = 2;
  kill_all(children);
  end_within(children, kDeath_s, nullptr);
  return children.any_failed();
}

ExitCode exit_code_of(int status) { return WIFEXITED(status) ? static_cast<ExitCode>(WEXITSTATUS(status)) : ExitCode::kSomeFailed; }

std::string how_it_ended(int status, const std::string& log) {
  const std::string said = tail_of(log);
  std::string how = WIFSIGNALED(status)
                        ? fmt::format("the process was ended by signal {} ({})", WTERMSIG(status), strsignal(WTERMSIG(status)))
                        : fmt::format("the process ended with exit code {}", WEXITSTATUS(status));
  return said.empty() ? how + "; see " + log : how + ": " + said;
}

std::string why_failed(const std::vector<int>& statuses, const std::optional<GroupFailure>& failure, const CaseFiles& files) {
  std::string signals;
  int first = -1;
  for (size_t i = 0; i < statuses.size(); ++i) {
    const int status = statuses[i];
    if (first < 0 && status != 0) first = static_cast<int>(i);
    if (WIFSIGNALED(status))
      signals += fmt::format("; process {} was ended by signal {} ({})", i, WTERMSIG(status), strsignal(WTERMSIG(status)));
  }
  if (failure) {  // which has no words where a process never joined
    const std::string text = failure->message + signals + (failure->hint.empty() ? "" : "; " + failure->hint);
    return text.starts_with("; ") ? text.substr(2) : text;
  }
  return how_it_ended(statuses[static_cast<size_t>(std::max(first, 0))], files.log(std::max(first, 0)));
}

}  // namespace shardlab::cases
