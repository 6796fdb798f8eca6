#include "plan/base/files.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>

namespace shardlab {
namespace {

constexpr int kWriterMilliseconds = 2000;

struct Opened {
  explicit Opened(int descriptor) : file(descriptor) {}
  Opened(const Opened&) = delete;
  Opened& operator=(const Opened&) = delete;
  ~Opened() {
    if (file >= 0) ::close(file);
  }
  const int file;
};

/// Waits until there are bytes or an end; false where the time is over. Without a bound where `milliseconds` is negative.
bool wait_for(int file, int milliseconds) {
  pollfd asked{file, POLLIN, 0};
  int ready = 0;
  do ready = ::poll(&asked, 1, milliseconds);
  while (ready < 0 && errno == EINTR);
  return ready != 0;
}

}  // namespace

Result<std::string> read_file_within(const std::string& path, int64_t most) {
  const auto refusal = [&](std::string message, std::string hint) {
    return Error{ExitCode::kUsage, std::move(message), std::move(hint), path};
  };
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) return refusal("is a folder, not a file", "name a file in it");
  const bool pipe = std::filesystem::is_fifo(path, ignored);
  // To open a pipe waits for whoever writes, and to read one without waiting tells whether there is one: an end where nobody is.
  const Opened opened(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK));
  if (opened.file < 0 && errno == ENOENT)
    return refusal("there is no such file", "check the path; a relative one begins at the current folder");
  if (opened.file < 0) return refusal(fmt::format("cannot be opened: {}", std::strerror(errno)), "check the path");
  std::string text;
  char part[1 << 16];
  bool waited = false, closed = false;
  while (true) {
    const ssize_t n = ::read(opened.file, part, sizeof part);
    if (n > 0) {
      if (static_cast<int64_t>(text.size()) + n > most)
        return refusal(fmt::format("has more than {} bytes, the most that is read of such a file", most),
                       "check that it is the file you mean");
      text.append(part, static_cast<size_t>(n));
    } else if (n == 0) {
      if (!pipe || closed || !text.empty()) return text;
      if (waited) return refusal("is a pipe into which nobody writes", "start the writer first, or name a file");
      // One who has opened it and not yet written is seen by the next read alone.
      closed = wait_for(opened.file, kWriterMilliseconds);
      waited = true;
    } else if (errno == EAGAIN) {
      wait_for(opened.file, -1);
    } else if (errno != EINTR) {
      return refusal(fmt::format("cannot be read: {}", std::strerror(errno)), "check the file");
    }
  }
}

Result<std::string> read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file)
    return Error{ExitCode::kUsage,
                 fmt::format("{} cannot be read", path),
                 "check the path; a relative one begins at the current folder",
                 {}};
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

}  // namespace shardlab
