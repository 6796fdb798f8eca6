// Who may include whom, and whose names lie where: section 2 of ARCHITECTURE.md, held to the sources.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

namespace fs = std::filesystem;

/// Folders that the files of a folder may include, beside their own. A folder within another, as "plan/base", is one of its own.
const std::map<std::string, std::set<std::string>, std::less<>> kMay = {
    {"plan/base", {}},
    {"plan", {"plan/base"}},
    {"kernels", {"plan/base"}},
    {"strategies", {"plan", "plan/base"}},
    {"runtime", {"plan", "plan/base", "kernels"}},
    {"profiler", {"plan", "plan/base"}},
    {"simulator/interpreter", {"plan", "plan/base"}},
    {"simulator/estimator", {"plan", "plan/base", "simulator/interpreter"}},
    {"sweeps", {"plan", "plan/base"}},
    {"reports", {"plan", "plan/base"}},
    {"answers", {"plan", "plan/base", "strategies", "simulator/interpreter", "simulator/estimator", "sweeps", "reports"}},
    {"interop", {"plan", "plan/base"}},
    {"cases",
     {"plan", "plan/base", "strategies", "kernels", "runtime", "profiler", "simulator/interpreter", "simulator/estimator", "sweeps",
      "reports", "answers"}},
    {"cli",
     {"plan", "plan/base", "strategies", "kernels", "runtime", "profiler", "simulator/interpreter", "simulator/estimator", "sweeps",
      "reports", "answers", "interop", "cases"}},
};

/// The folder of the table that a path, relative to the root, lies in, the innermost; empty where it is in none.
std::string folder_of(std::string_view path) {
  const size_t first = path.find('/'), second = first == path.npos ? first : path.find('/', first + 1);
  for (const size_t end : {second, first})
    if (end != path.npos && kMay.contains(path.substr(0, end))) return std::string(path.substr(0, end));
  return "";
}

/// Paths that a text includes in quotes.
std::vector<std::string> quoted_includes(std::istream& text) {
  std::vector<std::string> paths;
  for (std::string line; std::getline(text, line);) {
    const size_t mark = line.find_first_not_of(" \t");
    if (mark == std::string::npos || line[mark] != '#') continue;
    const size_t word = line.find_first_not_of(" \t", mark + 1), open = line.find('"');
    if (word == std::string::npos || line.compare(word, 7, "include") != 0 || open == std::string::npos) continue;
    paths.push_back(line.substr(open + 1, line.find('"', open + 1) - open - 1));
  }
  return paths;
}

/// Whether a file of the folder `from` may include what lies at `path`.
bool may_include(const std::string& from, const std::string& path) {
  const std::string to = folder_of(path);
  // What lies in no folder of the table is of another library; of this project's, tests and benchmarks are nobody's to include.
  if (to.empty()) return !path.starts_with("tests/") && !path.starts_with("benchmarks/");
  return to == from || kMay.at(from).contains(to);
}

/// Whether a file of `folder` may define names in the namespace `opened`: the folder's own or one inside. Names of `plan` are
/// shardlab's own, or in a namespace that is no folder's; kernels for GPUs are those of `gpu`, elementary functions of both sides those of `elementary`.
bool may_open(std::string_view folder, std::string_view opened) {
  const auto within = [&](std::string_view home) { return opened == home || opened.starts_with(std::string(home) + "::"); };
  if (folder == "plan" || folder == "plan/base")
    return std::none_of(kMay.begin(), kMay.end(),
                        [&](const auto& other) { return within("shardlab::" + other.first.substr(0, other.first.find('/'))); });
  if (folder == "kernels" && (within("shardlab::gpu") || within("shardlab::elementary"))) return true;
  return within("shardlab::" + std::string(folder.substr(0, folder.find('/'))));
}

/// Namespaces that a text opens at its left margin, but for blocks that only declare names in advance.
std::vector<std::string> opened_namespaces(std::istream& text) {
  const std::string opening = "namespace shardlab";
  std::vector<std::string> opened;
  std::string block;
  bool defines = false;
  for (std::string line; std::getline(text, line);) {
    if (line.starts_with(opening) && line.ends_with(" {")) {
      block = line.substr(10, line.size() - 12);
      defines = false;
    } else if (!block.empty() && line.starts_with("}") &&
               (line.size() == 1 || line.find("// namespace " + block) != std::string::npos)) {
      if (defines) opened.push_back(block);
      if (line.find("// namespace") != std::string::npos || !defines) block.clear();
    } else if (!line.empty() && !line.starts_with("//") && !line.starts_with("struct ") && !line.starts_with("class ")) {
      defines = true;
    } else if (line.ends_with("{")) {
      defines = true;
    }
  }
  return opened;
}

TEST_CASE("the namespace rule tells a folder's own names from another's") {
  CHECK(may_open("plan", "shardlab"));
  CHECK(may_open("plan/base", "shardlab"));
  CHECK(may_open("sweeps", "shardlab::sweeps"));
  CHECK(may_open("simulator/estimator", "shardlab::simulator::search"));
  CHECK(may_open("kernels", "shardlab::gpu::cudnn"));
  CHECK_FALSE(may_open("sweeps", "shardlab"));
  CHECK_FALSE(may_open("sweeps", "shardlab::strategies"));
  CHECK_FALSE(may_open("plan", "shardlab::sweeps"));
  CHECK_FALSE(may_open("simulator/interpreter", "shardlab::simulators"));
  std::istringstream text(
      "namespace shardlab {\nstruct Case;\nclass Plan;\n}\n\nnamespace shardlab::sweeps {\nstruct Draft {\n  int i;\n};\n}  // "
      "namespace shardlab::sweeps\n");
  CHECK(opened_namespaces(text) == std::vector<std::string>{"shardlab::sweeps"});
}

TEST_CASE("the folder rule tells what may be included from what may not") {
  CHECK(may_include("runtime", "kernels/kernels.h"));
  CHECK(may_include("cli", "simulator/estimator/analytic/analytic.h"));
  CHECK(may_include("plan", "plan/base/result.h"));
  CHECK(may_include("sweeps", "nlohmann/json.hpp"));
  CHECK_FALSE(may_include("plan/base", "plan/case.h"));
  CHECK_FALSE(may_include("kernels", "plan/op.h"));
  CHECK_FALSE(may_include("simulator/interpreter", "strategies/lower.h"));
  CHECK(may_include("simulator/estimator", "simulator/interpreter/fabric.h"));
  CHECK_FALSE(may_include("simulator/interpreter", "simulator/estimator/analytic/analytic.h"));
  CHECK_FALSE(may_include("strategies", "kernels/kernels.h"));
  CHECK_FALSE(may_include("reports", "cli/common.h"));
  CHECK_FALSE(may_include("runtime", "tests/test.h"));
  std::istringstream text("#include \"a/b.h\"\n  #  include \"c.h\"\n#include <d.h>\n// #include \"e.h\"\n");
  CHECK(quoted_includes(text) == std::vector<std::string>{"a/b.h", "c.h"});
}

TEST_CASE("every folder includes only those that it may know, and defines names in its own namespace only") {
  const fs::path root = testing::source_dir();
  std::map<std::string, int> files, blocks;
  for (const auto& [folder, allowed] : kMay) {
    for (const auto& entry : fs::recursive_directory_iterator(root / folder)) {
      const std::string ending = entry.path().extension().string();
      if (ending != ".cpp" && ending != ".h" && ending != ".cu" && ending != ".cuh" && ending != ".inc") continue;
      const std::string path = fs::relative(entry.path(), root).generic_string();
      if (folder_of(path) != folder) continue;  // plan/base is looked at by itself
      ++files[folder];
      std::ifstream names(entry.path());
      for (const std::string& opened : opened_namespaces(names)) {
        INFO(path << " defines names in " << opened);
        CHECK((may_open(folder, opened) || path.ends_with("/namespaces.h")));
        ++blocks[folder];
      }
      std::ifstream text(entry.path());
      for (const std::string& included : quoted_includes(text)) {
        INFO(path << " includes " << included);
        CHECK(may_include(folder, included));
        // An include beside the file would say nothing of its folder: every path begins at the root.
        if (!folder_of(included).empty()) CHECK(fs::exists(root / included));
        CHECK_FALSE(included.starts_with("."));
      }
    }
  }
  for (const auto& [folder, allowed] : kMay) {
    INFO(folder);
    CHECK(files[folder] >= 5);
    CHECK(blocks[folder] >= 5);
  }
}

}  // namespace
}  // namespace shardlab::testing
