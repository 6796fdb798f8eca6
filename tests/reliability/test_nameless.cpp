// Files on a file system without nameless files, as those of networks are: they have their temporary name from the beginning. A
// filter of system calls refuses O_TMPFILE as such a file system does, to a process of its own and to what that starts.
#include <fcntl.h>
#include <fmt/format.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstddef>

#include "plan/base/files.h"
#include "plan/base/pending_file.h"
#include "reports/table.h"
#include "tests/cli/program.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

namespace fs = std::filesystem;

/// From here on `open` refuses O_TMPFILE, in this process and its children; false where the kernel takes no filter.
bool refuse_nameless_files() {
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_openat, 0, 4),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[2])),  // the low half: machines here are little-endian
      BPF_STMT(BPF_ALU | BPF_AND | BPF_K, O_TMPFILE),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, O_TMPFILE, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EOPNOTSUPP),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog filter{sizeof program / sizeof program[0], program};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

constexpr int kNoFilter = 77;

/// The exit code of `body` in a process that can make no nameless file; -SIGNAL where a signal ended it.
template <class Body>
int without_nameless_files(const Body& body) {
  const pid_t child = fork();
  if (child == 0) _exit(refuse_nameless_files() ? body() : kNoFilter);
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

bool can_filter() {
  const bool can =
      without_nameless_files([] { return open("/tmp", O_WRONLY | O_TMPFILE, 0600) < 0 && errno == EOPNOTSUPP ? 0 : 1; }) == 0;
  if (!can) WARN("system calls cannot be filtered here: not tried");
  return can;
}

/// Names in a folder that are temporary.
std::vector<std::string> temporary_names(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::recursive_directory_iterator(folder))
    if (const std::string name = entry.path().filename().string(); name.find(".new-") != std::string::npos) names.push_back(name);
  return names;
}

TEST_CASE("without nameless files a pending file has a temporary name, and a planted one is left alone") {
  if (!can_filter()) return;
  const Scratch scratch;
  const std::string path = scratch.write("kept", "old");
  const std::string victim = scratch.write("victim", "precious");
  fs::permissions(path, fs::perms::owner_read | fs::perms::owner_write);
  CHECK(without_nameless_files([&] {
          fs::create_symlink(victim, fmt::format("{}.new-{}-0", path, getpid()));
          {
            PendingFile file(path);
            file.write("half");
            if (!is_there(fmt::format("{}.new-{}-1", path, getpid())) || slurp(path) != "old") return 1;
          }
          if (is_there(fmt::format("{}.new-{}-1", path, getpid()))) return 2;
          write_file_atomically(path, "new");
          return 0;
        }) == 0);
  CHECK(slurp(path) == "new");
  CHECK(fs::status(path).permissions() == (fs::perms::owner_read | fs::perms::owner_write));
  CHECK(slurp(victim) == "precious");
  const auto left = temporary_names(scratch / "");
  REQUIRE(left.size() == 1);
  CHECK(fs::is_symlink(scratch / left[0]));
}

TEST_CASE("what a process that was killed amid a write left under its temporary name is taken away by the next") {
  if (!can_filter()) return;
  const Scratch scratch;
  const std::string path = scratch.write("kept", "old");
  const int end = without_nameless_files([&] {
    PendingFile file(path);
    file.write("half");
    kill(getpid(), SIGKILL);
    return 0;
  });
  CHECK(end == -SIGKILL);
  CHECK(slurp(path) == "old");
  CHECK(temporary_names(scratch / "").size() == 1);
  CHECK(without_nameless_files([&] { return write_output(path, "whole"), 0; }) == 0);
  CHECK(slurp(path) == "whole");
  CHECK(temporary_names(scratch / "").empty());
}

TEST_CASE("a run without nameless files leaves its results and nothing else, also after one that was killed") {
  if (!can_filter()) return;
  const Scratch scratch;
  const std::string sweep = scratch.write("s.yaml",
                                          "version: 1\nname: s\nmode: simulate\nmodel: tiny-gpt\nmachine: h100-sxm5-80gb\n"
                                          "train: {seq_len: 64, global_batch_tokens: 512}\naxes: {seed: [1, 2]}\n");
  const std::string out = scratch / "run";
  const auto shardlab = [&](const std::string& words) {
    return without_nameless_files([&] {
      const int status = std::system(fmt::format("{} {} >/dev/null 2>&1", program_path(), words).c_str());
      return WIFEXITED(status) ? WEXITSTATUS(status) : 99;
    });
  };
  CHECK(shardlab(fmt::format("run {} --traces all --out {}", sweep, out)) == 0);
  CHECK(temporary_names(out).empty());
  CHECK(parse_csv(slurp(out + "/results.csv")).size() == 3);
  // As a driver leaves them that was killed: of the run and of a case. Its lock keeps the living apart.
  scratch.write("run/results.csv.new-1-0", "half");
  for (const auto& entry : fs::directory_iterator(out))
    if (entry.is_directory()) std::ofstream(entry.path() / "plan.txt.new-1-3") << "half";
  CHECK(temporary_names(out).size() == 3);
  CHECK(shardlab(fmt::format("run {} --out {} --resume", sweep, out)) == 0);
  CHECK(temporary_names(out).empty());
  CHECK(shardlab(fmt::format("report {} --html {}", out, scratch / "r.html")) == 0);
  CHECK(slurp(scratch / "r.html").ends_with("</html>\n"));
  CHECK(temporary_names(scratch / "").empty());
}

}  // namespace
}  // namespace shardlab::testing
