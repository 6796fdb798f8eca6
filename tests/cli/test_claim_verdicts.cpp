// Every verdict on the claims that ship and are simulated, against a golden file: a change that turns a sentence is seen.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <sstream>
#include <string>
#include <vector>

#include "sweeps/sweep.h"
#include "tests/cli/program.h"
#include "tests/namespaces.h"

using namespace shardlab;
using namespace shardlab::testing;

namespace {

/// The sweeps of claims whose mode is simulate, by name.
std::vector<std::string> simulated_sweeps() {
  LoadOptions options;
  options.local_machine = [] { return Result<Machine>(Machine{.local = true}); };
  std::vector<std::string> files;
  for (const auto& entry : fs::directory_iterator(source_dir() + "/sweeps/claims")) {
    const auto sweep = load_sweep(entry.path().string(), options);
    INFO(entry.path());
    REQUIRE(sweep.ok());
    if (sweep->mode() == Mode::kSimulate) files.push_back(entry.path().string());
  }
  std::ranges::sort(files);
  return files;
}

/// `line` with its parts on lines of their own: the sentence, the reason, the check with its figures, the lack of margin.
std::string in_parts(std::string line) {
  for (const char* part : {" Why: ", " Tested: ", " Not tested, ", " No margin: "})
    if (const size_t at = line.find(part); at != std::string::npos) line.replace(at, 1, "\n    ");
  if (const size_t at = line.find(", where "); at != std::string::npos) line.replace(at + 1, 1, "\n      ");
  return "  " + line + "\n";
}

}  // namespace

TEST_CASE("verdicts on the shipped claims that are simulated are those of the golden file") {
  const Scratch scratch;
  std::string golden;
  int holding = 0, failing = 0;
  for (const std::string& file : simulated_sweeps()) {
    const std::string name = fs::path(file).stem().string();
    const Output output = shardlab_program(scratch, fmt::format("run {} --out {}", file, scratch / name));
    INFO(file);
    INFO(output.err);
    REQUIRE(output.code == 0);
    golden += name + "\n";
    std::istringstream lines(output.out);
    for (std::string line; std::getline(lines, line);) {
      const bool holds = line.starts_with("Holds here"), fails = line.starts_with("Does not hold here");
      CHECK_FALSE(line.starts_with("Undecided"));
      if (!holds && !fails) continue;
      (holds ? holding : failing) += 1;
      INFO(line);
      CHECK((holds || line.find(" Why: ") != std::string::npos));  // a sentence that fails says why
      golden += in_parts(line);
    }
  }
  CHECK(holding > 0);
  CHECK(failing > 0);
  REQUIRE_GOLDEN("cli/claims.txt", golden);
}
