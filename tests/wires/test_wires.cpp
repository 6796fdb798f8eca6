// Plans of every strategy, trained by ranks in several processes: the bits, peaks and wire bytes are those of threads. Over MPI: mpi.sh.
#include <string>

#include "tests/deal.h"
#include "tests/namespaces.h"
#include "tests/test.h"
#include "tests/wires/campaign.h"
#include "tests/wires/group.h"

namespace shardlab::testing {

namespace {

/// Trains `cases` on threads and on each of `wires`, and compares every line that every process has.
void compare_wires(const std::vector<Case>& cases, const std::vector<std::string>& wires, int processes) {
  constexpr double kMost_s = 1200;
  const GroupEnd threads = run_group(
      1, [&](Control&) { return train_cases(cases, "threads", processes, nullptr); }, 60, kMost_s);
  REQUIRE(threads.texts[0].find("refused") == std::string::npos);
  REQUIRE(threads.texts[0].find("state ") != std::string::npos);
  for (const std::string& wire : wires) {
    INFO(wire << " in " << processes << " processes");
    const GroupEnd end = run_group(
        processes, [&](Control& control) { return train_cases(cases, wire, processes, &control); }, 60, kMost_s);
    INFO((end.failure ? end.failure->message : ""));
    for (int p = 0; p < processes; ++p) {
      CHECK(end.statuses[static_cast<size_t>(p)] == 0);
      CHECK(first_difference(threads.texts[0], end.texts[static_cast<size_t>(p)]) == "");
    }
  }
}

}  // namespace

// With as many processes as ranks, and with two ranks in each or more; in one process fewer cases, but thoroughly.
TEST_CASE("every strategy trains over processes to the bits, peaks and bytes of threads") {
  const std::vector<Case> cases = campaign_cases();
  REQUIRE(cases.size() >= 60);
  for (const int processes : {2, 4}) compare_wires(cases, {"processes", "tcp"}, processes);
  compare_wires(campaign_cases(thorough() ? 5 : 40), {"processes", "tcp"}, 1);
}

// Gloo gives each message to a thread, which takes several times as long as the steps of a small model.
TEST_CASE("strategies train over Gloo to the bits, peaks and bytes of threads") {
  if (!gloo_is_built()) return;  // the test wires_gloo says that it is skipped
  const std::vector<Case> cases = campaign_cases(thorough() ? 5 : 40);
  for (const int processes : thorough() ? std::vector{1, 2, 4} : std::vector{2, 4}) compare_wires(cases, {"gloo"}, processes);
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
