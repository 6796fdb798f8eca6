// What documents show of the program is what the program prints, and the tests that documents name are there.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "cli/lists.h"
#include "cli/pairs.h"
#include "tests/cli/program.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

std::string text_of(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

const std::filesystem::path kRoot = testing::source_dir();

/// What a document must say between two places, both found from the front.
struct Passage {
  std::string from;   ///< begins the passage, which has it
  std::string until;  ///< ends the passage, which has it not; where it is not found the document's end does
};

bool updates_golden() {
  const char* update = std::getenv("SHARDLAB_UPDATE_GOLDEN");
  return update != nullptr && std::string_view(update) == "1";
}

/// Replaces the passage by `text`, or compares the two: as golden files are, with SHARDLAB_UPDATE_GOLDEN. Empty when equal.
std::string passage_difference(const std::string& document, const Passage& passage, const std::string& text) {
  std::string page = text_of(kRoot / document);
  const size_t begin = page.find(passage.from);
  if (begin == std::string::npos) return document + " does not say: " + passage.from;
  const size_t end = std::min(page.find(passage.until, begin), page.size());
  if (page.compare(begin, end - begin, text) == 0) return "";
  if (!updates_golden()) return document + " differs from what the program prints; `./dev golden` rewrites it:\n" + text;
  std::ofstream(kRoot / document) << page.replace(begin, end - begin, text);
  return "";
}

TEST_CASE("the table of strategies in docs/strategies.md is generated from the catalogue") {
  const std::string table = print_table(strategy_table(), TableFormat::kMarkdown);
  REQUIRE(passage_difference("docs/strategies.md", {"| pass | strategy |", "\n\n"},
                             table.substr(0, table.find_last_not_of('\n') + 1)) == "");
}

TEST_CASE("docs/keys.md is generated from the table of keys") {
  const std::string table = print_table(key_table(), TableFormat::kMarkdown);
  REQUIRE(passage_difference("docs/keys.md", {"| key | short |", "\n\n"}, table.substr(0, table.find_last_not_of('\n') + 1)) == "");
  CHECK(key_table("fsdp").rows.size() == 4);
}

TEST_CASE("the pairs that go together, in docs/compatibility.md, are those that the program lets through") {
  const std::string tables =
      print_table(pair_matrix(), TableFormat::kMarkdown) + "\n" + print_table(refused_pairs(), TableFormat::kMarkdown);
  REQUIRE(passage_difference("docs/compatibility.md", {"| with | 1 |", "\n\n#"}, tables) == "");
}

/// A table of docs/accuracy.md: the scores of each set of published runs, which tests/validate holds to the program. Untuned ones are
/// in the order of their errors, the worst first.
std::string accuracy_table(bool untuned) {
  std::map<std::string, std::map<std::string, double>> sets;
  std::stringstream scores(text_of(kRoot / "simulator/published/scores.csv"));
  std::string line;
  std::getline(scores, line);
  while (std::getline(scores, line)) {
    std::stringstream fields(line);
    std::string group, figure, value;
    std::getline(fields, group, ','), std::getline(fields, figure, ','), std::getline(fields, value, ',');
    sets[group][figure] = std::stod(value);
  }
  std::vector<std::string> names;
  const std::filesystem::path folder = kRoot / "simulator/published/runs" / (untuned ? "untuned" : "");
  for (const auto& [name, figures] : sets)
    if (std::filesystem::exists(folder / (name + ".csv"))) names.push_back(name);
  const auto error = [&](const std::string& name) {
    const auto it = sets[name].find("step_error_pct");
    return it == sets[name].end() ? -1 : it->second;
  };
  if (untuned) std::stable_sort(names.begin(), names.end(), [&](const auto& a, const auto& b) { return error(a) > error(b); });
  Table table;
  for (const char* name : {untuned ? "untuned set" : "set", "rows", "step time, mean |error|", "|bias|", "worst", "rank",
                           "memory, mean |error|", "wrong about fit", "time in interval", "its width", "memory in interval"})
    table.columns.push_back({.name = name, .unit = {}, .heading = {}});
  for (const std::string& name : names) {
    const auto& figures = sets[name];
    const auto percent = [&](const char* figure) {
      const auto it = figures.find(figure);
      return it == figures.end() ? std::string() : fmt::format("{:.1f} %", it->second);
    };
    const auto within = [&](const char* figure) {
      const auto it = figures.find(figure);
      return it == figures.end() ? std::string() : fmt::format("{:.0f} %", 100 - it->second);
    };
    const std::string rows = text_of(folder / (name + ".csv"));
    const std::string live = percent("live_error_pct");
    table.rows.push_back(
        {name, std::count(rows.begin(), rows.end(), '\n') - 1, percent("step_error_pct"), percent("step_bias_pct"),
         percent("step_worst_pct"), figures.contains("rank_missing") ? fmt::format("{:.3f}", 1 - figures.at("rank_missing")) : "",
         live.empty() ? percent("reserved_error_pct") : live, percent("fit_wrong_pct"), within("step_uncovered_pct"),
         figures.contains("step_interval_pct") ? "+-" + percent("step_interval_pct") : "", within("memory_uncovered_pct")});
  }
  const std::string text = print_table(table, TableFormat::kMarkdown);
  return text.substr(0, text.find_last_not_of('\n') + 1);
}

TEST_CASE("the scores in docs/accuracy.md are those of the published runs") {
  CHECK(passage_difference("docs/accuracy.md", {"| set | rows |", "\n\n"}, accuracy_table(false)) == "");
  CHECK(passage_difference("docs/accuracy.md", {"| untuned set | rows |", "\n\n"}, accuracy_table(true)) == "");
}

/// What the commands behind " | " leave of a text: `head -N`, `tail -N`, `grep -v WORD`.
std::string part_of(const std::string& text, const std::string& pipes) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line + "\n");
  for (size_t begin = pipes.find(" | "); begin != std::string::npos; begin = pipes.find(" | ", begin + 1)) {
    std::istringstream words(pipes.substr(begin + 3));
    std::string program, option, word;
    words >> program >> option;
    if (program == "grep") {
      REQUIRE(option == "-v");
      words >> word;
      std::erase_if(lines, [&](const std::string& line) { return line.find(word) != std::string::npos; });
      continue;
    }
    const auto count = std::min(lines.size(), static_cast<size_t>(std::stoi(option.substr(1))));
    REQUIRE((program == "head" || program == "tail"));
    if (program == "head")
      lines.resize(count);
    else
      lines.erase(lines.begin(), lines.end() - static_cast<std::ptrdiff_t>(count));
  }
  return fmt::format("{}", fmt::join(lines, ""));
}

/// Runs every command that a document shows after the prompt `$ build/release/shardlab`, one after another in one folder that has the
/// shipped sweeps, and compares what the document shows of the output with what the program prints. The count of commands.
int check_commands(const std::string& document) {
  const std::string page = text_of(kRoot / document), prompt = "\n$ build/release/shardlab ";
  const testing::Scratch scratch;
  fs::create_directory_symlink(kRoot / "sweeps", scratch / "sweeps");
  int commands = 0;
  for (size_t begin = page.find(prompt); begin != std::string::npos; begin = page.find(prompt, begin + 1), ++commands) {
    const size_t words = begin + prompt.size(), end = page.find('\n', words);
    const std::string shown = page.substr(words, end - words), line = page.substr(begin + 1, end - begin);
    const size_t pipe = shown.find(" | ");  // a long output is shown in part, as a reader would ask for it
    const std::string arguments = shown.substr(0, pipe);
    INFO(document << ": " << arguments);
    setenv("COLUMNS", "0", 1);  // as in a reader's pipe
    const testing::Output output = testing::shardlab_program(scratch, arguments, "cd " + (scratch / "") + " &&");
    unsetenv("COLUMNS");
    INFO(output.err);
    CHECK(output.code == 0);
    const std::string text = part_of(output.out, pipe == std::string::npos ? "" : shown.substr(pipe));
    CHECK(passage_difference(document, {line, "```"}, line + text) == "");
  }
  return commands;
}

TEST_CASE("what the README and the tutorial show of a command is what the command prints") {
  CHECK(check_commands("README.md") > 0);
  CHECK(check_commands("docs/tutorial.md") > 8);
}

TEST_CASE("every pair is judged once, and every refusal says what to do instead") {
  const Table all = pair_list(), refused = refused_pairs();
  size_t legal = 0;
  for (const auto& row : all.rows) legal += std::get<bool>(row[2]) ? 1 : 0;
  CHECK(all.rows.size() == legal + refused.rows.size());
  CHECK(legal > refused.rows.size());
  for (const auto& row : refused.rows) {
    CAPTURE(std::get<std::string>(row[1]), std::get<std::string>(row[2]));
    CHECK_FALSE(std::get<std::string>(row[3]).empty());
    CHECK_FALSE(std::get<std::string>(row[4]).empty());
  }
}

TEST_CASE("every test that docs/pitfalls.md names is there") {
  std::string sources;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(kRoot / "tests"))
    if (entry.path().extension() == ".cpp") sources += text_of(entry.path());
  const std::string page = text_of(kRoot / "docs/pitfalls.md");
  size_t rows = 0, named = 0;
  std::istringstream lines(page);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("| ") || line.starts_with("| fault")) continue;
    ++rows;
    const std::string tests = line.substr(line.rfind(" | ") + 3);  // the last cell
    for (size_t begin = tests.find('`'); begin != std::string::npos; begin = tests.find('`', begin)) {
      const size_t end = tests.find('`', begin + 1);
      REQUIRE(end != std::string::npos);
      const std::string name = tests.substr(begin + 1, end - begin - 1);
      INFO(name);
      CHECK(sources.find("TEST_CASE(\"" + name + "\"") != std::string::npos);
      ++named;
      begin = end + 1;
    }
  }
  CHECK(rows > 30);
  CHECK(named >= rows);  // each row has a test
}

}  // namespace
}  // namespace shardlab::testing
