// Files that are whole or not there, and outputs that the user named.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <thread>

#include "plan/base/files.h"
#include "plan/base/pending_file.h"
#include "plan/base/world_error.h"
#include "tests/cli/program.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

namespace fs = std::filesystem;

int files_in(const std::string& folder) {
  return static_cast<int>(std::distance(fs::directory_iterator(folder), fs::directory_iterator()));
}

/// The number of a process that has ended.
pid_t dead_process() {
  const pid_t child = fork();
  if (child == 0) _exit(0);
  waitpid(child, nullptr, 0);
  return child;
}

TEST_CASE("a pending file is not there, then whole, and a planted name is left alone") {
  const Scratch scratch;
  const std::string path = scratch.write("kept", "old");
  const std::string victim = scratch.write("victim", "precious");
  const std::string planted = fmt::format("{}.new-{}-0", path, getpid());
  fs::create_symlink(victim, planted);
  fs::permissions(path, fs::perms::owner_read | fs::perms::owner_write);
  {
    PendingFile file(path);
    file.write("half");
    CHECK(slurp(path) == "old");
  }
  CHECK(slurp(path) == "old");
  write_file_atomically(path, "new");
  CHECK(slurp(path) == "new");
  CHECK(fs::status(path).permissions() == (fs::perms::owner_read | fs::perms::owner_write));
  CHECK(slurp(victim) == "precious");
  CHECK(fs::is_symlink(planted));
  CHECK(files_in(scratch / "") == 3);
}

/// Whether files without names can be made there.
bool has_nameless_files(const std::string& folder) {
  const int file = open(folder.c_str(), O_WRONLY | O_TMPFILE | O_CLOEXEC, 0600);
  if (file >= 0) close(file);
  return file >= 0;
}

TEST_CASE("a process that is killed amid a write leaves nothing of it") {
  const Scratch scratch;
  if (!has_nameless_files(scratch / "")) {
    WARN("this file system has no files without names: not tried");
    return;
  }
  const std::string path = scratch.write("kept", "old");
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    PendingFile file(path);
    file.write("half");
    kill(getpid(), SIGKILL);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  REQUIRE(WIFSIGNALED(status));
  CHECK(slurp(path) == "old");
  CHECK(files_in(scratch / "") == 1);
}

TEST_CASE("a file of the program's own replaces a planted link, and does not write through it") {
  const Scratch scratch;
  const std::string victim = scratch.write("victim", "precious");
  fs::create_symlink(victim, scratch / "results.csv");
  write_file_atomically(scratch / "results.csv", "rows");
  CHECK(slurp(victim) == "precious");
  CHECK(fs::symlink_status(scratch / "results.csv").type() == fs::file_type::regular);
}

TEST_CASE("an output that is a pipe is written into, and stays one") {
  const Scratch scratch;
  const std::string pipe = scratch / "pipe";
  REQUIRE(mkfifo(pipe.c_str(), 0600) == 0);
  std::string read;
  std::thread reader([&] { read = slurp(pipe); });
  write_output(pipe, "rows");
  reader.join();
  CHECK(read == "rows");
  CHECK(fs::is_fifo(pipe));
  CHECK(files_in(scratch / "") == 1);
}

TEST_CASE("an output that is a device is written into, stays one, and a full one is said") {
  CHECK_THROWS_AS(write_output("/dev/full", "rows"), WorldError);
  write_output("/dev/null", "rows");
  CHECK(fs::is_character_file("/dev/full"));
  CHECK(fs::is_character_file("/dev/null"));
}

TEST_CASE("an output that is a link is followed, and the link stays") {
  const Scratch scratch;
  const std::string file = scratch.write("file", "old");
  fs::create_symlink(file, scratch / "link");
  write_output(scratch / "link", "new");
  CHECK(fs::is_symlink(scratch / "link"));
  CHECK(slurp(file) == "new");
  CHECK(files_in(scratch / "") == 2);
}

TEST_CASE("an output that is an open file goes on where that file is") {
  const Scratch scratch;
  const int file = open((scratch / "log").c_str(), O_WRONLY | O_CREAT, 0600);
  REQUIRE(write(file, "first ", 6) == 6);
  write_output(fmt::format("/dev/fd/{}", file), "second");
  REQUIRE(write(file, " third", 6) == 6);
  close(file);
  CHECK(slurp(scratch / "log") == "first second third");
}

TEST_CASE("what a killed process left of an output is taken away when the output is written again") {
  const Scratch scratch;
  const std::string path = scratch / "report.html";
  const std::string left = scratch.write(fmt::format("report.html.new-{}-0", dead_process()), "half");
  const std::string of_another = scratch.write(fmt::format("other.html.new-{}-0", dead_process()), "half");
  const std::string of_a_living = scratch.write(fmt::format("report.html.new-{}-0", getppid()), "half");
  write_output(path, "whole");
  CHECK(slurp(path) == "whole");
  CHECK_FALSE(is_there(left));
  CHECK(is_there(of_another));
  CHECK(is_there(of_a_living));
}

TEST_CASE("temporary files are told from others by their names, and links among them are not followed") {
  const Scratch scratch;
  const pid_t dead = dead_process();
  fs::create_directories(scratch / "case/checkpoints/deep");
  for (const char* file : {"a", "case/b", "case/checkpoints/c", "case/checkpoints/deep/d"})
    scratch.write(fmt::format("{}.new-{}", file, dead), "half");
  for (const char* other : {"a.new-", "a.new-7x", "a.new-7-", "a.new--7", "notes.new-york"}) scratch.write(other, "kept");
  scratch.write("living.new-1-0", "half");
  const std::string victim = scratch.write("victim", "precious");
  fs::create_symlink(victim, scratch / fmt::format("link.new-{}", dead));
  fs::create_directory_symlink(scratch / "case/checkpoints/deep", scratch / "elsewhere");
  CHECK(remove_pending_files(scratch / "", 2) == 4);  // a, b, c and the link
  CHECK(is_there(scratch / fmt::format("case/checkpoints/deep/d.new-{}", dead)));
  CHECK(slurp(victim) == "precious");
  CHECK(remove_pending_files(scratch / "", 0, true) == 1);  // that of process 1 too
  CHECK(files_in(scratch / "") == 5 + 3);                   // the others, the folder, the victim, the link to a folder
}

TEST_CASE("an input that is a pipe is read where somebody writes, and refused where nobody does") {
  const Scratch scratch;
  const std::string pipe = scratch / "pipe";
  REQUIRE(mkfifo(pipe.c_str(), 0600) == 0);
  for (const std::string verb : {"run", "plan", "validate", "memory --machine h100 --model"}) {
    const Output alone = shardlab_program(scratch, verb + " " + pipe);
    CHECK(alone.code == 2);
    CHECK(alone.err.find("is a pipe into which nobody writes") != std::string::npos);
  }
  // One that opens it and takes longer than anybody waits for a writer.
  const std::string sweep =
      scratch.write("s.yaml", "model: tiny-gpt\nmachine: h100-sxm5-80gb\ntrain: {seq_len: 64, global_batch_tokens: 512}\n");
  const Output slow =
      shardlab_program(scratch, "run " + pipe + " --dry-run", fmt::format("{{ sleep 3; cat {}; }} > {} & ", sweep, pipe));
  INFO(slow.err);
  CHECK(slow.code == 0);
  CHECK(shardlab_program(scratch, "run /dev/stdin --dry-run", "cat " + sweep + " |").code == 0);
}

TEST_CASE("nothing is written through what is planted in a run directory under the name of the store, the lock or a case") {
  const Scratch scratch;
  const std::string sweep =
      scratch.write("s.yaml", "model: tiny-gpt\nmachine: h100-sxm5-80gb\ntrain: {seq_len: 64, global_batch_tokens: 512}\n");
  const std::string out = scratch / "run";
  const auto run_with = [&](const std::string& name, const auto& plant) {
    fs::remove_all(out);
    fs::create_directory(out);
    plant(out + "/" + name);
    return shardlab_program(scratch, "run " + sweep + " --out " + out);
  };
  const std::string empty = scratch.write("empty", ""), victim = scratch.write("victim", "precious");
  const Output store = run_with("results.sqlite", [&](const std::string& at) { fs::create_symlink(empty, at); });
  CHECK(store.code == 6);
  CHECK(store.err.find("results.sqlite is a link") != std::string::npos);
  CHECK(slurp(empty).empty());
  const Output pipe = run_with("results.sqlite", [&](const std::string& at) { mkfifo(at.c_str(), 0600); });
  CHECK(pipe.code == 6);
  CHECK(pipe.err.find("results.sqlite is no file") != std::string::npos);
  CHECK(shardlab_program(scratch, "report " + out).err.find("results.sqlite is no file") != std::string::npos);
  for (const bool hard : {false, true})
    CHECK(run_with("run.lock", [&](const std::string& at) {
            hard ? fs::create_hard_link(victim, at) : fs::create_symlink(victim, at);
          }).code == 6);
  CHECK(slurp(victim) == "precious");
  CHECK(run_with("unused", [](const std::string&) {}).code == 0);
  std::string id;
  for (const auto& entry : fs::directory_iterator(out))
    if (entry.is_directory()) id = entry.path().filename().string();
  fs::create_directory(scratch / "folder");
  const Output folder = run_with(id, [&](const std::string& at) { fs::create_directory_symlink(scratch / "folder", at); });
  CHECK(folder.code == 4);
  CHECK(folder.out.find("is a link: files of the case would be written elsewhere") != std::string::npos);
  CHECK(fs::is_empty(scratch / "folder"));
}

}  // namespace
}  // namespace shardlab::testing
