#include "reports/run_lock.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "plan/base/world_error.h"

namespace shardlab::reports {

namespace {

/// What the holder wrote into the lock file; empty in the moment before it has.
std::string holder_of(int file) {
  std::array<char, 1024> text;
  const ssize_t n = ::pread(file, text.data(), text.size(), 0);
  std::string holder(text.data(), n > 0 ? static_cast<size_t>(n) : 0);
  while (!holder.empty() && holder.back() == '\n') holder.pop_back();
  return holder;
}

std::string host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "this machine";
}

/// Takes the lock, or finds that another process has it. Who looks whether the lock is taken has it for a moment (`is_taken`).
bool lock_soon(int file) {
  constexpr int kTries = 20;
  constexpr useconds_t kPause_us = 5000;
  for (int i = 0; ::flock(file, LOCK_EX | LOCK_NB) != 0; ++i) {
    if (errno != EWOULDBLOCK || i == kTries) return false;
    ::usleep(kPause_us);
  }
  return true;
}

}  // namespace

bool RunLock::is_taken(const std::string& directory) {
  const int file = ::open((directory + "/run.lock").c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
  if (file < 0) return false;
  const bool taken = ::flock(file, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
  ::close(file);
  return taken;
}

Result<RunLock> RunLock::take(const std::string& directory, std::string_view command) {
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (error)
    throw WorldError(fmt::format("{}: {} while creating the run directory", directory, error.message()),
                     "choose another directory with --out");
  const std::string path = directory + "/run.lock";
  const auto fail = [&](const char* doing) {
    return WorldError(fmt::format("{}: {} while {}", path, std::strerror(errno), doing),
                      "make the run directory writable, or choose another with --out");
  };
  const int file = ::open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0666);
  if (file < 0) throw fail("opening the lock of the run directory");
  RunLock lock(directory, file);
  struct stat found {};
  if (::fstat(file, &found) != 0 || !S_ISREG(found.st_mode) || found.st_nlink != 1)
    throw WorldError(fmt::format("{} is no file of its own, which could be written", path),
                     "remove it, or choose another directory with --out");
  if (!lock_soon(file)) {
    if (errno != EWOULDBLOCK) throw fail("locking the run directory");
    const std::string holder = holder_of(file);
    return Error{ExitCode::kUsage,
                 fmt::format("{} is written by another run: {}", directory, holder.empty() ? "a process that just began" : holder),
                 "wait until that process has ended, or name another --out", ""};
  }
  const std::string holder = fmt::format("process {} on {}, {}\n", ::getpid(), host_name(), command.substr(0, 512));
  if (::ftruncate(file, 0) != 0 || ::pwrite(file, holder.data(), holder.size(), 0) != static_cast<ssize_t>(holder.size()))
    throw fail("writing the lock of the run directory");
  return lock;
}

RunLock::~RunLock() {
  if (file_ >= 0) ::close(file_);
}

}  // namespace shardlab::reports
