#include "tests/wires/group.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <map>
#include <thread>

#include "cases/execution.h"
#include "plan/base/check.h"
#include "runtime/gloo_transport.h"
#include "runtime/mpi_transport.h"
#include "runtime/process_transport.h"
#include "runtime/tcp_transport.h"
#include "tests/paths.h"
#include "tests/wires/hosts.h"

namespace shardlab::testing {
namespace {

std::string gloo_beside_program() { return (std::filesystem::path(testing::program_path()).parent_path() / kGlooFile).string(); }

/// In a child, which ends with its parent: signals do what they do by default.
void begin_child() {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  for (const int caught : {SIGSEGV, SIGABRT, SIGFPE, SIGILL, SIGTERM, SIGINT}) std::signal(caught, SIG_DFL);  // the test program's
}

void write_whole(int to, const std::string& text) {
  for (size_t at = 0; at < text.size();) {
    const ssize_t n = ::write(to, text.data() + at, text.size() - at);
    if (n <= 0) break;
    at += static_cast<size_t>(n);
  }
}

/// In the child: runs the body, writes what it returned, ends without this process's destructors.
[[noreturn]] void be_process(int process, int processes, const Endpoint& server, const std::string& token, double timeout_s,
                             const std::function<std::string(Control&)>& body, int to) {
  std::string text;
  int status = 0;
  try {
    Control control(server, token, process, processes, timeout_s);
    try {
      text = body(control);
    } catch (const WorldError& e) {
      control.fail(e.what(), e.hint());
      throw;
    }
  } catch (const std::exception& e) {
    text = std::string("failed: ") + e.what();
    status = 4;
  }
  write_whole(to, text);
  ::_exit(status);
}

/// Children of this process that nobody has waited for, among them those whose own parent has ended; ends them.
int end_what_is_left() {
  int left = 0;
  while (true) {
    siginfo_t child{};
    if (::waitid(P_ALL, 0, &child, WEXITED | WNOHANG | WNOWAIT) != 0) return left;
    if (child.si_pid != 0) {
      ::waitpid(child.si_pid, nullptr, 0);
      continue;
    }
    ++left;
    return left;  // one that runs: enough to fail a test, which ends this process and so its children
  }
}

}  // namespace

GroupEnd run_group(int processes, const std::function<std::string(Control&)>& body, double timeout_s, double most_s,
                   const std::function<void(const std::vector<pid_t>&)>& meanwhile, Hosts* hosts) {
  using Clock = std::chrono::steady_clock;
  const std::string token = fmt::format("token {}", ::getpid());
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);  // a process that a child leaves behind becomes one of this process
  Endpoint at;
  if (hosts != nullptr) at.host = hosts->address(0);
  const auto serve = [&] { return std::make_unique<ControlServer>(processes, at, token, timeout_s); };
  const auto serving = hosts == nullptr ? serve() : hosts->on(0, serve);
  ControlServer& server = *serving;
  std::vector<pid_t> children;
  std::vector<FileDescriptor> ends;
  for (int p = 0; p < processes; ++p) {
    std::array<int, 2> pipe{};
    SHARDLAB_CHECK(::pipe(pipe.data()) == 0, "no pipe for process {}", p);
    const pid_t child = hosts == nullptr ? ::fork() : hosts->fork_on(p);
    SHARDLAB_CHECK(child >= 0, "no process {}", p);
    if (child == 0) {
      begin_child();
      ::close(pipe[0]);
      be_process(p, processes, server.endpoint(), token, timeout_s, body, pipe[1]);
    }
    ::close(pipe[1]);
    ends.emplace_back(pipe[0]);
    children.push_back(child);
  }
  GroupEnd end;
  end.texts.resize(static_cast<size_t>(processes));
  end.statuses.resize(static_cast<size_t>(processes));
  if (meanwhile) meanwhile(children);
  const auto begin = Clock::now();
  std::vector<std::thread> readers;
  for (int p = 0; p < processes; ++p)
    readers.emplace_back([&, p] {
      std::array<char, 4096> bytes;
      for (ssize_t n = 0; (n = ::read(ends[static_cast<size_t>(p)].get(), bytes.data(), bytes.size())) > 0;)
        end.texts[static_cast<size_t>(p)].append(bytes.data(), static_cast<size_t>(n));
    });
  for (int p = 0; p < processes; ++p) {
    const pid_t child = children[static_cast<size_t>(p)];
    int& status = end.statuses[static_cast<size_t>(p)];
    while (::waitpid(child, &status, WNOHANG) == 0) {
      if (Clock::now() - begin > std::chrono::duration<double>(most_s)) ::kill(child, SIGKILL);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  for (std::thread& reader : readers) reader.join();
  end.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  end.failure = server.failure();
  end.left_behind = end_what_is_left();
  return end;
}

bool has_ended(pid_t child) {
  siginfo_t info{};
  return ::waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == child;
}

std::vector<std::string> in_processes(size_t jobs, int at_once, const std::function<std::string(size_t)>& job) {
  struct Running {
    pid_t child = 0;
    FileDescriptor from;
  };
  std::vector<std::string> texts(jobs);
  std::map<size_t, Running> running;
  for (size_t next = 0; next < jobs || !running.empty();) {
    while (next < jobs && std::ssize(running) < at_once) {
      std::array<int, 2> pipe{};
      SHARDLAB_CHECK(::pipe(pipe.data()) == 0, "no pipe for job {}", next);
      const pid_t child = ::fork();
      SHARDLAB_CHECK(child >= 0, "no process for job {}", next);
      if (child == 0) {
        begin_child();
        std::string text;
        try {
          text = job(next);
        } catch (const std::exception& e) { text = std::string("failed: ") + e.what(); }
        write_whole(pipe[1], text);
        ::_exit(0);
      }
      ::close(pipe[1]);
      running[next++] = {child, FileDescriptor(pipe[0])};
    }
    std::vector<pollfd> waits;
    for (const auto& [number, one] : running) waits.push_back({one.from.get(), POLLIN, 0});
    ::poll(waits.data(), waits.size(), -1);
    size_t at = 0;
    for (auto it = running.begin(); it != running.end(); ++at) {
      std::array<char, 4096> bytes;
      const ssize_t n = waits[at].revents == 0 ? -1 : ::read(it->second.from.get(), bytes.data(), bytes.size());
      if (n > 0) texts[it->first].append(bytes.data(), static_cast<size_t>(n));
      if (n != 0) {
        ++it;
        continue;
      }
      int status = 0;
      ::waitpid(it->second.child, &status, 0);
      if (status != 0) texts[it->first] = fmt::format("ended by status {:#x}", status);
      it = running.erase(it);
    }
  }
  return texts;
}

bool gloo_is_built() { return std::filesystem::exists(gloo_beside_program()); }

std::unique_ptr<Transport> wire_named(const std::string& name, const kernels::Kernels& kernels, const PlacedPlan& placed,
                                      Control* control, double timeout_s) {
  if (name == "threads") return std::make_unique<ThreadTransport>(kernels);
  if (name == "tcp") return std::make_unique<TcpTransport>(kernels, placed, *control, timeout_s);
  if (name == "gloo") {
    const auto library = GlooLibrary::open(gloo_beside_program());
    if (!library.ok()) throw WorldError(library.error().message, library.error().hint);
    auto& world = control->kept<GlooWorld>([&] { return new GlooWorld(*library, *control, timeout_s); });
    return std::make_unique<GlooTransport>(kernels, placed, *control, world);
  }
  if (name == "mpi") {
    auto& world = control->kept<MpiWorld>([&] {
      auto mpi = open_mpi(mpi_files());
      if (!mpi.ok()) throw WorldError(mpi.error().message, mpi.error().hint);
      return new MpiWorld(std::move(*mpi), *control, timeout_s);
    });
    return std::make_unique<MpiTransport>(kernels, placed, *control, world);
  }
  auto made = ProcessTransport::create(kernels, placed, *control, true);
  if (!made.ok()) throw WorldError(made.error().message, made.error().hint);
  return std::move(*made);
}

}  // namespace shardlab::testing
