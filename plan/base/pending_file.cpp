#include "plan/base/pending_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>

#include "plan/base/world_error.h"

namespace shardlab {

namespace {

namespace fs = std::filesystem;

constexpr std::string_view kMark = ".new-";
constexpr int kAttempts = 100;

/// Writes all of `bytes`; false with errno set.
bool write_all(int file, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(file, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return false;
    bytes.remove_prefix(static_cast<size_t>(n));
  }
  return true;
}

/// The process in a temporary name, "x.new-<process>" or "x.new-<process>-<n>"; nothing where the name is no such name.
std::optional<pid_t> writer_of(std::string_view name) {
  const size_t at = name.rfind(kMark);
  if (at == std::string_view::npos || at == 0) return std::nullopt;
  const std::string_view rest = name.substr(at + kMark.size());
  pid_t process = 0;
  auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), process);
  if (error != std::errc() || process <= 0) return std::nullopt;
  if (end == rest.data() + rest.size()) return process;
  unsigned number = 0;
  if (*end != '-') return std::nullopt;
  const auto [last, wrong] = std::from_chars(end + 1, rest.data() + rest.size(), number);
  return wrong == std::errc() && last == rest.data() + rest.size() ? std::optional(process) : std::nullopt;
}

bool lives(pid_t process) { return ::kill(process, 0) == 0 || errno != ESRCH; }

/// Takes away what dead processes left of this very file.
void remove_leftovers(const fs::path& path) {
  const fs::path folder = path.has_parent_path() ? path.parent_path() : fs::path(".");
  const std::string begin = path.filename().string() + std::string(kMark);
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) {
    const std::string name = entry.path().filename().string();
    const auto writer = writer_of(name);
    if (name.starts_with(begin) && writer && !lives(*writer)) fs::remove(entry.path(), ignored);
  }
}

/// The path under which an open file can be linked.
std::string link_to(int file) { return fmt::format("/proc/self/fd/{}", file); }

/// A file without a name in the folder of `path`; the operating system frees it however the process ends. -1 if the file system has
/// no such files (network file systems), or if the file could not be given a name later.
int open_nameless(const std::string& path) {
  const fs::path folder = fs::path(path).parent_path();
  const int file = ::open(folder.empty() ? "." : folder.c_str(), O_WRONLY | O_TMPFILE | O_CLOEXEC, 0666);
  if (file < 0 || ::access(link_to(file).c_str(), F_OK) == 0) return file;
  ::close(file);
  return -1;
}

/// The descriptor that a path of /dev stands for, "/dev/stdout" and "/dev/fd/7"; -1 for every other path.
int descriptor_of(std::string_view path) {
  if (path == "/dev/stdout") return STDOUT_FILENO;
  if (path == "/dev/stderr") return STDERR_FILENO;
  for (const std::string_view folder : {"/dev/fd/", "/proc/self/fd/"}) {
    int descriptor = -1;
    if (!path.starts_with(folder)) continue;
    const std::string_view number = path.substr(folder.size());
    const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), descriptor);
    if (error == std::errc() && end == number.data() + number.size()) return descriptor;
  }
  return -1;
}

/// Whether what is at `path`, seen through links, is written into: an open file, a pipe, a device.
bool written_into(const std::string& path) {
  struct stat found {};
  return descriptor_of(path) >= 0 || (::stat(path.c_str(), &found) == 0 && !S_ISREG(found.st_mode));
}

void write_into(const std::string& path, std::string_view text) {
  const auto fail = [&](const char* doing) {
    throw WorldError(fmt::format("{}: {} while {}", path, std::strerror(errno), doing), "name another file, or make room");
  };
  // An open file keeps its place: opened by its path again it would be written from its beginning.
  const int descriptor = descriptor_of(path);
  const int file = descriptor >= 0 ? ::dup(descriptor) : ::open(path.c_str(), O_WRONLY | O_CLOEXEC | O_NOCTTY);
  if (file < 0) fail("opening it");
  const bool whole = write_all(file, text);
  const int code = errno;
  const bool closed = ::close(file) == 0;
  if (!whole) errno = code;
  if (!whole || !closed) fail("writing it");
}

}  // namespace

PendingFile::PendingFile(std::string path, std::string what, std::string remedy)
    : path_(std::move(path)), what_(std::move(what)), remedy_(std::move(remedy)), file_(open_nameless(path_)) {
  if (file_ < 0)
    take_temporary_name("creating it", [&](const char* name) {
      file_ = ::open(name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
      return file_ >= 0;
    });
}

void PendingFile::take_temporary_name(const char* doing, const std::function<bool(const char*)>& make) {
  for (int n = 0; n < kAttempts; ++n) {
    temporary_ = fmt::format("{}{}{}-{}", path_, kMark, ::getpid(), n);
    if (make(temporary_.c_str())) return;
    if (errno != EEXIST) break;
  }
  temporary_.clear();
  fail(doing);
}

PendingFile::~PendingFile() {
  if (file_ >= 0) ::close(file_);
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void PendingFile::write(std::string_view bytes) {
  if (!write_all(file_, bytes)) fail("writing it");
}

void PendingFile::sync() {
  if (::fsync(file_) != 0) fail("writing it to the disk");
}

void PendingFile::place(const std::string& path) {
  struct stat old {};
  if (::lstat(path.c_str(), &old) == 0 && S_ISREG(old.st_mode)) (void)::fchmod(file_, old.st_mode & 07777);
  if (temporary_.empty())
    take_temporary_name("naming it", [&](const char* name) {
      return ::linkat(AT_FDCWD, link_to(file_).c_str(), AT_FDCWD, name, AT_SYMLINK_FOLLOW) == 0;
    });
  if (::close(std::exchange(file_, -1)) != 0) fail("closing it");
  if (::rename(temporary_.c_str(), path.c_str()) != 0) fail("putting it in place");
  temporary_.clear();
}

void PendingFile::fail(const char* doing) {
  const int code = errno;
  const fs::path folder = fs::path(path_).parent_path();
  std::error_code unknown;
  if (code == ENOENT && !folder.empty() && !fs::exists(folder, unknown))
    throw WorldError(fmt::format("{}{}: there is no folder {}", what_, path_, folder.string()), "make it, or name another file");
  throw WorldError(fmt::format("{}{}: {} while {}", what_, path_, std::strerror(code), doing), remedy_);
}

void write_file_atomically(const std::string& path, std::string_view text) {
  PendingFile file(path);
  file.write(text);
  file.place();
}

void write_output(const std::string& path, std::string_view text) {
  if (written_into(path)) return write_into(path, text);
  std::error_code missing;
  const fs::path real = fs::canonical(path, missing);
  const fs::path target = missing ? fs::path(path) : real;
  remove_leftovers(target);
  write_file_atomically(target.string(), text);
}

int remove_pending_files(const std::string& folder, int depth, bool all) {
  int removed = 0;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    std::error_code ignored;
    const fs::file_status status = entry.symlink_status(ignored);
    if (fs::is_directory(status)) {
      if (depth > 0) removed += remove_pending_files(entry.path().string(), depth - 1, all);
    } else if (const auto writer = writer_of(entry.path().filename().string()); writer && (all || !lives(*writer))) {
      removed += fs::remove(entry.path(), ignored) ? 1 : 0;
    }
  }
  return removed;
}

}  // namespace shardlab
