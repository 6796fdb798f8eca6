#include "cases/environment.h"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <sys/utsname.h>

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <functional>
#include <string>

#include "cases/namespaces.h"
#include "commit.h"
#include "kernels/kernels.h"
#include "plan/base/files.h"
#include "runtime/core_scheduler.h"

namespace shardlab::cases {
namespace {

/// The value of the first line of `file` that begins with `key`, after its separator; empty when there is none.
std::string field(const char* file, std::string_view key, char separator) {
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    if (!line.starts_with(key)) continue;
    const size_t at = line.find(separator);
    if (at == std::string::npos) continue;
    const size_t begin = line.find_first_not_of(" \t\"", at + 1);
    std::string value = begin == std::string::npos ? "" : line.substr(begin);
    while (!value.empty() && (value.back() == '"' || value.back() == ' ')) value.pop_back();
    return value;
  }
  return {};
}

}  // namespace

std::string program_version(const std::string& version, const std::string& commit, const std::string& executable) {
  if (!commit.empty() && !commit.ends_with("-dirty")) return version + "+" + commit;
  const auto program = read_file(executable);
  // Tells one build from another on one machine: any hash does, and this one takes a fifth of hash_text's time. A program that cannot be
  // read gets a name that no stored result has, so that nothing stale is taken for fresh.
  const std::string build = program.ok() ? fmt::format("{:016x}", std::hash<std::string>{}(*program)) : "unknown-" + today();
  return fmt::format("{}+{}{}", version, commit.empty() ? "" : commit + ".", build);
}

std::string program_version() {
  static const std::string version = program_version(SHARDLAB_VERSION, SHARDLAB_COMMIT, "/proc/self/exe");
  return version;
}

std::string version_line() {
  const std::string commit = SHARDLAB_COMMIT;
  return commit.empty() ? fmt::format("shardlab {}", SHARDLAB_VERSION) : fmt::format("shardlab {} ({})", SHARDLAB_VERSION, commit);
}

std::string processor_name() {
  const std::string name = field("/proc/cpuinfo", "model name", ':');
  return name.empty() ? "unknown processor" : name;
}

int usable_cores() { return static_cast<int>(usable_processors().size()); }

namespace {

/// A line of /proc/meminfo in bytes, or the control group's limit where that is less.
int64_t memory_of(std::string_view line) {
  const std::string stated = field("/proc/meminfo", line, ':');
  int64_t bytes = stated.empty() ? 0 : std::atoll(stated.c_str()) * 1024;
  std::ifstream limit("/sys/fs/cgroup/memory.max");
  if (int64_t most = 0; limit >> most && most > 0) bytes = bytes == 0 ? most : std::min(bytes, most);
  return bytes;
}

}  // namespace

int64_t usable_memory() { return memory_of("MemAvailable"); }
int64_t total_memory() { return memory_of("MemTotal"); }

std::string today() { return fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr))); }

RunMetadata describe_environment(const std::string& command) {
  RunMetadata run;
  run.program_version = program_version();
  run.commit = SHARDLAB_COMMIT;
  run.compiler = fmt::format("{} {}",
#if defined(__clang__)
                             "Clang",
#else
                             "GCC",
#endif
                             __VERSION__);
  run.libraries = description(kernels::kernels_for_this_processor());
  run.command = command;
  run.date = today();
  utsname system{};
  uname(&system);
  run.host = system.nodename;
  run.processor = processor_name();
  const std::string distribution = field("/etc/os-release", "PRETTY_NAME", '=');
  run.system = fmt::format("{} {}{}{}", system.sysname, system.release, distribution.empty() ? "" : ", ", distribution);
  run.cores = usable_cores();
  run.memory_bytes = usable_memory();
  return run;
}

}  // namespace shardlab::cases
