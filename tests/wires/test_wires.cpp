// Plans of every strategy, trained by ranks in several processes: the bits, peaks and wire bytes are those of threads. Over MPI: mpi.sh.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <span>
#include <sstream>
#include <string>
#include <vector>

#include "tests/deal.h"
#include "tests/namespaces.h"
#include "tests/test.h"
#include "tests/wires/campaign.h"
#include "tests/wires/group.h"

namespace shardlab::testing {

namespace {

constexpr double kPartPatience_s = 60, kMostOfPart_s = 1200;

/// A layer kind of eight experts, of which a token chooses two.
Model mixture_of_eight(float capacity) {
  Model m;
  m.name = "mixture";
  m.family = Family::kLlama;
  m.layers = 2, m.hidden = 32, m.heads = 4, m.kv_heads = 2, m.head_dim = 8;
  m.ffn = 40, m.vocab = 64, m.max_positions = 24;
  m.experts = {.count = 8, .top_k = 2, .ffn = 20, .capacity_factor = capacity};
  return m;
}

/// Cases on one wire over a number of processes.
struct Part {
  std::string wire;
  int processes = 1;
  std::span<const Case> cases;
};

/// What a part must make of its cases, of the lines that threads have made of `all`: cases that the processes cannot share out are left out.
std::string expected_of(const Part& part, std::span<const Case> all, const std::string& threads) {
  std::map<std::string, std::string> lines;
  std::istringstream in(threads);
  size_t at = 0;
  for (std::string line; std::getline(in, line) && at < all.size(); ++at) lines[all[at].name] = line + "\n";
  std::string expected;
  for (const Case& c : part.cases)
    if (c.layout.world_size() % part.processes == 0) expected += lines[c.name];
  return expected;
}

/// Trains the part over processes: the lines that all processes have, or what went wrong.
std::string train_part(const Part& part) {
  const bool threads = part.wire == "threads";
  const GroupEnd end = run_group(
      part.processes,
      [&](Control& control) { return train_cases(part.cases, part.wire, part.processes, threads ? nullptr : &control); },
      kPartPatience_s, kMostOfPart_s);
  if (end.failure) return "failed: " + end.failure->message;
  for (size_t p = 0; p < end.texts.size(); ++p) {
    if (end.statuses[p] != 0) return fmt::format("process {} ended with status {:#x}", p, end.statuses[p]);
    if (const std::string other = first_difference(end.texts[0], end.texts[p]); !other.empty())
      return fmt::format("process {} has other lines than process 0: {}", p, other);
  }
  return end.texts[0];
}

/// Trains `cases` on threads, and each part on its wire, and compares every line that every process has. Several parts train at once: each
/// leaves cores idle while its ranks wait for one another.
void compare_wires(std::span<const Case> cases, std::vector<Part> parts) {
  parts.insert(parts.begin(), Part{"threads", 1, cases});
  const std::vector<std::string> lines = in_processes(parts.size(), kAtOnce, [&](size_t i) { return train_part(parts[i]); });
  REQUIRE(lines[0].find("refused") == std::string::npos);
  REQUIRE(lines[0].find("state ") != std::string::npos);
  REQUIRE(std::ranges::count(lines[0], '\n') == std::ssize(cases));
  for (size_t i = 1; i < parts.size(); ++i) {
    INFO(parts[i].wire << " in " << parts[i].processes << " processes");
    const std::string expected = expected_of(parts[i], cases, lines[0]);
    REQUIRE(expected.find("state ") != std::string::npos);
    CHECK(first_difference(expected, lines[i]) == "");
  }
}

}  // namespace

// With as many processes as ranks, and with two ranks in each or more; in one process fewer cases. Thoroughly all, else a third.
TEST_CASE("every strategy trains over processes to the bits, peaks and bytes of threads") {
  const std::vector<Case> cases = campaign_cases();
  REQUIRE(cases.size() >= 60);
  const auto part = [&](size_t first, uint64_t sample) {
    std::vector<Case> taken;
    for (size_t i = thorough() ? 0 : first; i < cases.size(); i += dealt(1, sample)) taken.push_back(cases[i]);
    return taken;
  };
  const std::vector<Case> thirds[] = {part(0, 3), part(1, 3), part(2, 3)}, few = part(0, 9);
  compare_wires(cases, {{"processes", 4, thirds[0]},
                        {"tcp", 4, thirds[1]},
                        {"tcp", 2, thirds[2]},
                        {"processes", 2, thirds[1]},
                        {"tcp", 1, few},
                        {"processes", 1, few}});
}

namespace {

/// Small mixtures whose ranks lie on two nodes, rows of experts by node.
std::vector<Case> cases_on_two_nodes() {
  std::vector<Case> cases;
  for (const int capacity : {0, 1}) {
    Case c;
    c.model = mixture_of_eight(static_cast<float>(capacity));
    c.machine.local = true, c.machine.nodes = 2;
    c.train.seq_len = 16, c.train.seed = 3;
    c.layout.dp = c.layout.ep = 4;
    c.layout.collective_algorithm = AlgorithmChoice::kHierarchical;
    c.name = fmt::format("by node capacity {}", capacity);
    cases.push_back(c);
  }
  return cases;
}

}  // namespace

TEST_CASE("rows of experts by node train on every wire to the bits, peaks and bytes of threads") {
  const std::vector<Case> cases = cases_on_two_nodes();
  std::vector<Part> parts{{"processes", 4, cases}, {"processes", 2, cases}, {"tcp", 4, cases}, {"tcp", 2, cases}};
  if (gloo_is_built()) parts.push_back({"gloo", 4, cases});
  compare_wires(cases, parts);
}

// Gloo gives each message to a thread, which takes several times as long as the steps of a small model.
TEST_CASE("strategies train over Gloo to the bits, peaks and bytes of threads") {
  if (!gloo_is_built()) return;  // the test wires_gloo says that it is skipped
  const std::vector<Case> cases = campaign_cases(thorough() ? 5 : 40);
  std::vector<Part> parts{{"gloo", 4, cases}, {"gloo", 2, cases}};
  if (thorough()) parts.push_back({"gloo", 1, cases});
  compare_wires(cases, parts);
}

TEST_CASE("ranks that cannot be shared out evenly are refused by every process") {
  Case c = campaign_cases().front();
  c.layout = {};
  c.layout.dp = 2;
  for (const std::string wire : {"processes", "tcp"}) {
    const GroupEnd end = run_group(3, [&](Control& control) -> std::string {
      const auto ranks = local_ranks(c.layout.world_size(), &control);
      return ranks.ok() ? "went on" : ranks.error().message;
    });
    for (const std::string& text : end.texts) CHECK(text == "2 ranks in 3 processes, which cannot have as many each");
  }
}

}  // namespace shardlab::testing
