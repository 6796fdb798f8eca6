// `--help`: two examples a verb that do what they say, in lines that a terminal of 100 columns shows whole.
#include <fmt/format.h>

#include <set>

#include "cli/help.h"
#include "cli/namespaces.h"
#include "reports/format.h"
#include "tests/cli/program.h"
#include "tests/cli/public_model.h"
#include "tests/namespaces.h"
#include "tests/paths.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

/// A folder with everything that the examples name: the shipped sweeps, a calibration, a run of a few cases and its two shards, two
/// cases, measured rows, what nccl-tests printed.
class Desk {
 public:
  Desk() {
    fs::create_directories(scratch_ / "runs");
    fs::create_directory_symlink(source_dir() + "/sweeps", scratch_ / "sweeps");
    fs::copy_file(source_dir() + "/tests/cli/calibrated.yaml", scratch_ / "runs/local.yaml");
    fs::copy_file(source_dir() + "/simulator/published/runs/korthikanti_2022.csv", scratch_ / "rows.csv");
    const std::string head = "model: tiny-gpt\nmachine: {preset: hgx-h100-ndr, nodes: 1}\nglobal_batch_tokens: 2Ki\nseq_len: 256\n";
    scratch_.write("small.yaml", head + "mode: simulate\ntraces: all\naxes: {dp: [1, 2]}\n");
    scratch_.write("case.yaml", head + "dp: 2\n");
    scratch_.write("best.yaml", head + "mode: simulate\nprofile: megatron\nresolution: analytic\ndp: 2\nzero: 1\n");
    public_model(scratch_, "tiny-llama");
    scratch_.write("ds_config.json",
                   R"({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 2}})");
    scratch_.write(
        "pretrain.sh",
        "torchrun pretrain_gpt.py --num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --vocab-size 50257 "
        "\\\n"
        "  --max-position-embeddings 1024 --micro-batch-size 8 --global-batch-size 512 --tensor-model-parallel-size 2 --lr 1e-3\n");
    fs::copy_file(source_dir() + "/tests/fuzz/corpus/nccl_tests/text", scratch_ / "all_reduce_perf.txt");
    REQUIRE(run("run small.yaml --out runs/quickstart").code == 0);
    fs::create_directory_symlink("quickstart", scratch_ / "runs/before");
    for (const char* shard : {"1", "2"})
      REQUIRE(run(fmt::format("run small.yaml --shard {0}/2 --out runs/sweep.shard-{0}-of-2", shard)).code == 0);
    for (const auto& entry : fs::directory_iterator(scratch_ / "runs/quickstart"))
      if (fs::exists(entry.path() / "case.yaml")) case_ = entry.path().filename().string();
    REQUIRE_FALSE(case_.empty());
  }
  Output run(const std::string& arguments) const {
    return shardlab_program(scratch_, arguments, fmt::format("cd {0} && HOME={0} XDG_CONFIG_HOME={0}", scratch_ / "."));
  }
  /// What a command wrote into the file that it names last, after `>` or `-o`.
  std::string file_of(const std::string& command) const {
    const size_t space = command.rfind(' ');
    return command.find(" > ") != std::string::npos || command.find(" -o ") != std::string::npos
               ? slurp(scratch_ / command.substr(space + 1))
               : "";
  }
  std::string named(std::string command) const {
    if (const size_t at = command.find("CASE"); at != std::string::npos) command.replace(at, 4, case_);
    return command;
  }

 private:
  Scratch scratch_;
  std::string case_;
};

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

TEST_CASE("every verb's help has two examples and lines of at most 100 characters") {
  const Scratch scratch;
  const Output all = shardlab_program(scratch, "--help");
  REQUIRE(all.code == 0);
  std::set<std::string> verbs;
  bool listed = false;
  for (const std::string& line : lines_of(all.out)) {
    CHECK(line.size() <= 100);
    if (listed && line.starts_with("  ") && line.size() > 2 && line[2] != ' ') verbs.insert(line.substr(2, line.find(' ', 2) - 2));
    listed = listed || line.starts_with("Subcommands");
  }
  CHECK(verbs.size() == cli::examples().size());
  for (const cli::Examples& e : cli::examples()) {
    INFO(e.verb);
    CHECK(verbs.contains(std::string(e.verb)));
    const Output help = shardlab_program(scratch, std::string(e.verb) + " --help");
    REQUIRE(help.code == 0);
    for (const std::string& line : lines_of(help.out)) {
      INFO(line);
      CHECK(line.size() <= 100);
    }
    for (const std::string_view command : e.commands) CHECK(help.out.find(std::string(command)) != std::string::npos);
    CHECK(help.out.find("Exit codes: 0 done") != std::string::npos);
  }
}

TEST_CASE("the examples of help do what they say") {
  const Desk desk;
  for (const cli::Examples& e : cli::examples()) {
    if (e.verb == "calibrate") continue;  // a minute of measuring
    for (const std::string_view command : e.commands) {
      std::string words = desk.named(std::string(command));
      if (words.find("sweeps/quickstart.yaml") != std::string::npos) words += " --dry-run";  // it trains for minutes
      if (const size_t large = words.find("-e 64Mi"); large != std::string::npos)
        words.replace(large, 7, "-e 64Ki");  // seconds of copying
      const Output o = desk.run(words);
      INFO(words << "\n" << o.err);
      CHECK(o.code == 0);
      CHECK_FALSE((o.out + o.err + desk.file_of(words)).empty());
    }
  }
}

TEST_CASE("a command line that is wrong is answered by a sentence with what to do next") {
  const Scratch scratch;
  fs::create_directory(scratch / "empty");
  const auto said = [&](const std::string& words) {
    const Output o = shardlab_program(scratch, words);
    CHECK(o.code == 2);
    CHECK(o.out.empty());
    return o.err;
  };
  const std::string memory =
      "\n  `shardlab memory --help` lists what it takes; for example: shardlab memory --model llama-3.1-8b "
      "--machine hgx-h100-ndr --devices 8 --profile torchtitan\n";
  CHECK(said("memory --machine h100").starts_with("shardlab: `memory` needs --model"));
  CHECK(said("memory --machine h100").ends_with(memory));
  CHECK(said("memory --modl gpt2 --machine h100") == "shardlab: `memory` has no option --modl; did you mean --model?" + memory);
  CHECK(said("memory --model=gpt2 --machin=h100") == "shardlab: `memory` has no option --machin; did you mean --machine?" + memory);
  CHECK(said("memory --model gpt2 --machine h100 --zero 0 --zero 1") ==
        "shardlab: `memory` takes --zero once, and it is given several times" + memory);
  CHECK(said("diff a.yaml").starts_with("shardlab: `diff` needs <b>: a second case"));
  CHECK(said("doctor now").starts_with("shardlab: `doctor` does not take `now`\n  `shardlab doctor --help` lists"));
  CHECK(said("model").starts_with("shardlab: `model` needs a verb of its own: list or show"));
  CHECK(said("").starts_with("shardlab: `shardlab` needs a verb: run, "));
  CHECK(said("").find("measure-case") == std::string::npos);  // the program's own
  CHECK(said("serach").starts_with("shardlab: there is no verb `serach`, did you mean `search`?"));
  CHECK(said("man serach").starts_with("shardlab: there is no verb `serach`, did you mean `search`?"));
  CHECK(said("memory --model gpt2 --machine h1000").starts_with("shardlab: no machine is named `h1000`, did you mean `h100`?"));
  CHECK(said("search --model gpt2 --machine h100 --devices 8 --global-batch-tokens 64Ki --profile megatorn")
            .starts_with("shardlab: no framework profile `megatorn`, did you mean `megatron`?"));
  CHECK(said("model show").starts_with("shardlab: `show` needs <name>"));
  CHECK(said("model show").find("`shardlab model show --help` lists") != std::string::npos);
  const std::string empty = scratch / "empty", none = scratch / "none";
  for (const std::string verb : {"report ", "explain "}) {
    CHECK(said(verb + empty) ==
          "shardlab: " + empty +
              " holds no results: it has no results.sqlite\n  name the directory that `shardlab run` wrote, or a case in "
              "it as DIRECTORY/CASE\n");
    CHECK(said(verb + none) ==
          "shardlab: there is no directory " + none +
              "\n  name the one that `shardlab run` wrote: it says which at its end, runs/NAME without --out\n");
  }
  CHECK(said("machine show x") ==
        "shardlab: no machine is named `x`\n  `shardlab machine list` prints the names; a path to a machine "
        "file is also a machine (write ./NAME for a file without .yaml)\n");
}

TEST_CASE("lines that go into a pipe have at most 120 characters, unless --wide or COLUMNS says otherwise") {
  const Scratch scratch;
  const auto longest = [&](const std::string& words, const char* columns) {
    setenv("COLUMNS", columns, 1);
    const Output o = shardlab_program(scratch, words);
    unsetenv("COLUMNS");
    INFO(words << o.err);
    REQUIRE(!o.out.empty());
    size_t most = 0;
    std::istringstream lines(o.out);
    for (std::string line; std::getline(lines, line);) most = std::max(most, static_cast<size_t>(display_width(line)));
    return most;
  };
  const std::string search = "search --model gpt2 --machine h100 --devices 64 --global-batch-tokens 64Ki --tokens 1T";
  for (const std::string& words : {std::string("keys"), std::string("strategies"), std::string("strategies --pairs"),
                                   std::string("model list"), std::string("machine list"), std::string("explain E103"),
                                   std::string("memory --model gpt2 --machine h100 --what-if zero=1"), search}) {
    INFO(words);
    CHECK(longest(words, "0") <= 120);
  }
  CHECK(longest("keys", "60") <= 60);
  CHECK(longest("keys --wide", "0") > 200);
  CHECK(longest(search + " --wide", "0") > 120);
}

}  // namespace
}  // namespace shardlab::testing
