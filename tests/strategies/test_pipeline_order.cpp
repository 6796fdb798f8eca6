// Schedules as grids: one row a stage, its slots in order; F2 is the forward of micro-batch 2, B2 its backward.
#include <fmt/format.h>

#include <algorithm>

#include "strategies/pipeline.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

std::string grid(Schedule schedule, int stages, int micro_batches) {
  std::string text;
  for (int stage = 0; stage < stages; ++stage) {
    std::string row;
    for (const PipelineSlot& s : pipeline_order(schedule, stages, stage, micro_batches))
      row += fmt::format("{}{}{}", row.empty() ? "" : " ", s.backward ? "B" : "F", s.micro_batch);
    text += row + "\n";
  }
  return text;
}

int in_flight(Schedule schedule, int stages, int stage, int micro_batches) {
  int now = 0, most = 0;
  for (const PipelineSlot& s : pipeline_order(schedule, stages, stage, micro_batches))
    most = std::max(most, now += s.backward ? -1 : 1);
  return most;
}

TEST_CASE("AFAB runs every forward, then every backward") {
  REQUIRE(grid(Schedule::kAfab, 2, 3) ==
          "F0 F1 F2 B0 B1 B2\n"
          "F0 F1 F2 B0 B1 B2\n");
}

TEST_CASE("1F1B warms up with p - 1 - stage forwards, then alternates") {
  REQUIRE(grid(Schedule::k1F1B, 4, 6) ==
          "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5\n"
          "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5\n"
          "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5\n"
          "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5\n");
}

TEST_CASE("1F1B with fewer micro-batches than stages") {
  REQUIRE(grid(Schedule::k1F1B, 4, 2) ==
          "F0 F1 B0 B1\n"
          "F0 F1 B0 B1\n"
          "F0 F1 B0 B1\n"
          "F0 B0 F1 B1\n");
}

TEST_CASE("every schedule runs each micro-batch forward once and backward once, in order") {
  for (const Schedule schedule : {Schedule::kAfab, Schedule::k1F1B})
    for (int stages = 1; stages <= 5; ++stages)
      for (int m = 1; m <= 9; ++m)
        for (int stage = 0; stage < stages; ++stage) {
          std::vector<int> forward, backward;
          for (const PipelineSlot& s : pipeline_order(schedule, stages, stage, m)) {
            (s.backward ? backward : forward).push_back(s.micro_batch);
            REQUIRE(backward.size() <= forward.size());
          }
          std::vector<int> expected(static_cast<size_t>(m));
          for (int j = 0; j < m; ++j) expected[static_cast<size_t>(j)] = j;
          REQUIRE(forward == expected);
          REQUIRE(backward == expected);
          REQUIRE(in_flight(schedule, stages, stage, m) == (schedule == Schedule::kAfab ? m : std::min(m, stages - stage)));
        }
}

TEST_CASE("stages are as even as can be") {
  REQUIRE(first_layer(7, 4, 0) == 0);
  REQUIRE(first_layer(7, 4, 1) == 2);
  REQUIRE(first_layer(7, 4, 2) == 4);
  REQUIRE(first_layer(7, 4, 3) == 6);
  REQUIRE(first_layer(7, 4, 4) == 7);
}

}  // namespace
}  // namespace shardlab::testing
