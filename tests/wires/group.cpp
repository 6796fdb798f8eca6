#include "tests/wires/group.h"

#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <thread>

#include "cases/execution.h"
#include "plan/base/check.h"
#include "runtime/gloo_transport.h"
#include "runtime/mpi_transport.h"
#include "runtime/process_transport.h"
#include "runtime/tcp_transport.h"
#include "tests/paths.h"

namespace shardlab::testing {
namespace {

std::string gloo_beside_program() { return (std::filesystem::path(testing::program_path()).parent_path() / kGlooFile).string(); }

/// In the child: runs the body, writes what it returned, ends without this process's destructors.
[[noreturn]] void be_process(int process, int processes, const Endpoint& server, const std::string& token, double timeout_s,
                             const std::function<std::string(Control&)>& body, int to) {
  for (const int caught : {SIGSEGV, SIGABRT, SIGFPE, SIGILL, SIGTERM, SIGINT}) std::signal(caught, SIG_DFL);  // the test program's
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
  for (size_t at = 0; at < text.size();) {
    const ssize_t n = ::write(to, text.data() + at, text.size() - at);
    if (n <= 0) break;
    at += static_cast<size_t>(n);
  }
  ::_exit(status);
}

}  // namespace

GroupEnd run_group(int processes, const std::function<std::string(Control&)>& body, double timeout_s, double most_s,
                   const std::function<void(const std::vector<pid_t>&)>& meanwhile) {
  using Clock = std::chrono::steady_clock;
  const std::string token = fmt::format("token {}", ::getpid());
  ControlServer server(processes, {}, token);
  std::vector<pid_t> children;
  std::vector<FileDescriptor> ends;
  for (int p = 0; p < processes; ++p) {
    std::array<int, 2> pipe{};
    SHARDLAB_CHECK(::pipe(pipe.data()) == 0, "no pipe for process {}", p);
    const pid_t child = ::fork();
    SHARDLAB_CHECK(child >= 0, "no process {}", p);
    if (child == 0) {
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
  return end;
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
