// The program run as its users run it, for tests: in a folder of its own, its output and exit code read back.
#pragma once

#include <fmt/format.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {

namespace fs = std::filesystem;

struct Output {
  int code = -1;
  std::string out, err;
};

/// A folder of its own for each test, removed at the end.
class Scratch {
 public:
  Scratch() {
    std::string pattern = (fs::temp_directory_path() / "shardlab-test-XXXXXX").string();
    path_ = mkdtemp(pattern.data());
  }
  ~Scratch() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  std::string write(const std::string& name, const std::string& text) const {
    std::ofstream(path_ + "/" + name) << text;
    return path_ + "/" + name;
  }

 private:
  std::string path_;
};

inline std::string slurp(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

/// `shardlab ARGUMENTS`; `before` is what the shell does first ("cd DIR && HOME=DIR"). Sentences stand in one line each, unless COLUMNS
/// is set; COLUMNS=0 is as if it were not.
inline Output shardlab_program(const Scratch& scratch, const std::string& arguments, const std::string& before = "") {
  const std::string errors = scratch / "stderr.txt";
  FILE* pipe = popen(
      fmt::format("{} COLUMNS=${{COLUMNS:-10000}} {} {} 2>{}", before, testing::program_path(), arguments, errors).c_str(), "r");
  REQUIRE(pipe != nullptr);
  Output output;
  std::array<char, 4096> buffer;
  for (size_t n; (n = fread(buffer.data(), 1, buffer.size(), pipe)) > 0;) output.out.append(buffer.data(), n);
  const int status = pclose(pipe);
  output.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  output.err = slurp(errors);
  return output;
}

/// A text with every run of blanks and line ends as one blank: sentences that the width of a line broke are whole again.
inline std::string joined(const std::string& text) {
  std::string out;
  for (const char c : text) {
    const bool blank = c == ' ' || c == '\n';
    if (!blank || (!out.empty() && out.back() != ' ')) out += blank ? ' ' : c;
  }
  return out;
}

using Rows = std::vector<std::vector<std::string>>;

/// The cell of `column` in a table's `row`; row 0 has the columns' names.
inline std::string cell(const Rows& rows, size_t row, const std::string& column) {
  const auto found = std::ranges::find(rows.at(0), column);
  INFO(column);
  REQUIRE(found != rows.at(0).end());
  return rows.at(row).at(static_cast<size_t>(found - rows.at(0).begin()));
}

}  // namespace shardlab::testing
