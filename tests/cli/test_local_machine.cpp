// This machine's calibration: where verbs find it, and which need none.
#include <fmt/format.h>

#include <filesystem>

#include "tests/cli/program.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

namespace fs = std::filesystem;

using testing::Output;
using testing::Scratch;
using testing::shardlab_program;

/// A folder that is current directory and home, so that no calibration of whoever runs the test is found.
class Place {
 public:
  Place() {
    scratch_.write("text.txt", std::string(4000, 'a') + "a text to learn from");
    scratch_.write(
        "s.yaml",
        "name: s\nmodel: {inline: {family: gpt, layers: 1, hidden: 32, heads: 4, ffn: 64, vocab: 256, max_positions: 32}}\n"
        "machine: {local: true}\ndata: {text: text.txt}\ntrain: {seq_len: 16}\nmeasure: {warmup: 1, steps: 1, repeat: 1}\n"
        "include: [{name: one, dp: 1}, {name: two, dp: 2}]\n");
  }
  Output run(const std::string& arguments) const {
    return shardlab_program(scratch_, arguments, fmt::format("cd {0} && env -u XDG_CONFIG_HOME HOME={0}", scratch_ / "."));
  }
  void calibrate(const std::string& file) const {
    fs::create_directories(fs::path(scratch_ / file).parent_path());
    fs::copy_file(testing::source_dir() + "/tests/cli/calibrated.yaml", scratch_ / file);
  }
  /// case.yaml of the first case of runs/s.
  std::string case_file() const {
    for (const auto& entry : fs::directory_iterator(scratch_ / "runs/s"))
      if (fs::exists(entry.path() / "case.yaml")) return (entry.path() / "case.yaml").string();
    return "none";
  }

 private:
  Scratch scratch_;
  friend std::string at(const Place& place, const std::string& name) { return place.scratch_ / name; }
};

bool says(const Output& output, const std::string& words) { return output.err.find(words) != std::string::npos; }

}  // namespace

TEST_CASE("what predicts nothing needs no calibration") {
  const Place place;
  const Output dry = place.run("run s.yaml --mode both --dry-run");
  INFO(dry.err);
  CHECK(dry.code == 0);
  CHECK(dry.out.find("expected time: not known") != std::string::npos);
  const Output measured = place.run("run s.yaml --mode measure --format csv");
  INFO(measured.err);
  REQUIRE(measured.code == 0);
  CHECK(measured.out.find("two,ok") != std::string::npos);
  CHECK(place.run("plan " + place.case_file()).code == 0);
  CHECK(place.run(fmt::format("diff {0} {0}", place.case_file())).code == 0);
  CHECK(place.run("memory --model tiny-gpt --machine local").code == 0);
  CHECK(place.run("explain runs/s/one").code == 0);
  const Output predicted = place.run("run s.yaml --mode both --out other");
  CHECK(predicted.code == 2);
  CHECK(says(predicted, "not calibrated"));
  CHECK(says(predicted, "runs/local.yaml, "));
  CHECK_FALSE(fs::exists(at(place, "other")));
  const Output named = place.run("run s.yaml --mode measure --machine-file none.yaml --out other");
  CHECK(named.code == 2);
  CHECK(says(named, "--machine-file none.yaml"));
}

TEST_CASE("doctor says what helps where the library of Gloo is not there, in a build and elsewhere") {
  const Scratch scratch;
  const auto hint = [&](const std::string& file) {
    return shardlab_program(scratch, "doctor --format json", fmt::format("SHARDLAB_GLOO={}", file)).out;
  };
  CHECK(hint(scratch / "libshardlab_gloo.so").find("build again, or ./dev wires") == std::string::npos);
  CHECK(hint(scratch / "libshardlab_gloo.so").find("name its library with SHARDLAB_GLOO") != std::string::npos);
  scratch.write("CMakeCache.txt", "");
  CHECK(hint(scratch / "libshardlab_gloo.so").find("apt-get install libgloo-dev and build again") != std::string::npos);
}

TEST_CASE("a calibration is found in runs/ before the one of the user, and said with its faults") {
  const Place place;
  place.calibrate(".config/shardlab/machine.yaml");
  const std::string config = "machine.yaml has it: calibrated 2026-01-01";
  const Output first = place.run("run s.yaml --mode both");
  INFO(first.err);
  REQUIRE(first.code == 0);
  CHECK(says(first, ".config/shardlab/" + config));
  CHECK(says(first, "was calibrated on none"));  // another processor's
  for (const std::string& words : {"plan " + place.case_file(), fmt::format("diff {0} {0}", place.case_file())}) {
    const Output of_run = place.run(words);
    CHECK(of_run.code == 0);
    CHECK(says(of_run, "runs/s/" + config));
  }
  CHECK(says(place.run("memory --model tiny-gpt --machine local"), ".config/shardlab/" + config));
  place.calibrate("runs/local.yaml");
  CHECK(says(place.run("memory --model tiny-gpt --machine local"), "this machine as runs/local.yaml has it"));
  CHECK(says(place.run("run s.yaml --mode both --dry-run"), "this machine as runs/local.yaml has it"));
  CHECK(place.run("doctor").out.find("in runs/local.yaml") != std::string::npos);
  // Who names a file is not told which.
  CHECK_FALSE(says(place.run("run s.yaml --dry-run --machine-file runs/local.yaml"), "has it"));
}

}  // namespace shardlab::testing
