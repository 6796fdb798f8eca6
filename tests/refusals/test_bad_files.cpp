// Files that are wrong, each given to the program as its users give it. What the program then says is kept in tests/golden/refusals, to be read
// aloud: a stranger must learn what is wrong, where, and what to do next.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "tests/cli/program.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

/// A folder of bad files and the command that each of the files is given to, in place of {}.
struct Reader {
  const char* folder;
  const char* command;
};

constexpr Reader kReaders[] = {
    {"sweeps", "run {} --dry-run"},
    {"machines", "machine show {}"},
    {"models", "model show {}"},
    {"plans", "plan {}"},
    {"schedules", "plan schedule.yaml --set schedule={}"},
    {"rows", "validate {}"},
    {"imports", "import {} --machine hgx-h100-ndr --model gpt2 --devices 8"},
};

std::string bad_files() { return source_dir() + "/tests/refusals/bad_files"; }

std::vector<std::string> files_in(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(bad_files() + "/" + folder)) names.push_back(entry.path().filename().string());
  std::ranges::sort(names);
  return names;
}

/// `text` without the place of this checkout.
std::string anywhere(std::string text) {
  const std::string place = bad_files() + "/";
  for (size_t at; (at = text.find(place)) != std::string::npos;) text.erase(at, place.size());
  return text;
}

}  // namespace

TEST_CASE("files that are wrong are refused in the words that are kept") {
  const Scratch scratch;
  size_t files = 0;
  for (const Reader& reader : kReaders) {
    std::string said;
    for (const std::string& name : files_in(reader.folder)) {
      const std::string file = fmt::format("{}/{}", reader.folder, name);
      INFO(file);
      const Output o = shardlab_program(scratch, fmt::format(fmt::runtime(reader.command), file), fmt::format("cd {} &&", bad_files()));
      CHECK((o.code == 2 || o.code == 3));  // wrong, or no: neither accepted, nor a bug, nor a signal
      CHECK(o.err.find("unexpected:") == std::string::npos);
      if (o.code == 2) CHECK(o.err.find("\n  ") != std::string::npos);  // the next step stands below what is wrong
      // `validate` prints its scores though every row was refused: they say nothing of the refusal.
      const std::string out = std::string_view(reader.folder) == "rows" ? "" : o.out;
      said += fmt::format("== {}\n{}{}exit {}\n\n", file, out, anywhere(o.err), o.code);
      ++files;
    }
    CHECK(golden_difference(fmt::format("refusals/{}.txt", reader.folder), said) == "");
  }
  CHECK(files_in("sweeps").size() >= 80);
  CHECK(files >= 150);
}

}  // namespace shardlab::testing
