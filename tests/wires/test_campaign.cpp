// One wire's part of the campaign, for mpi.sh and for whoever wants the figures of one wire. Hidden: it says what it has found, and
// others compare. Over mpi it is started by mpirun, over every other wire it starts the processes itself.
//
//   SHARDLAB_CAMPAIGN="tcp 4 5 OUT.txt" test_wires '[.campaign]'      # wire, processes, every which pair of strategies, file
#include <fmt/format.h>

#include <cstdlib>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>

#include "cases/job_place.h"
#include "tests/namespaces.h"
#include "tests/test.h"
#include "tests/wires/campaign.h"
#include "tests/wires/group.h"

namespace shardlab::testing {
namespace {

constexpr double kPatience_s = 60;

/// In the place that a launcher gives: the first process serves the group, and has the lines.
std::optional<std::string> in_job(const std::vector<Case>& cases, const std::string& wire, int processes) {
  const auto found = find_job_place({}, process_environment());
  REQUIRE(found.ok());
  REQUIRE(found->has_value());
  const JobPlace& place = **found;
  REQUIRE(place.world_size == processes);
  std::optional<ControlServer> server;
  if (place.rank == 0) server.emplace(place.world_size, place.master, place.token);
  Control control(place.master, place.token, place.rank, place.world_size, kPatience_s);
  try {
    std::string lines = train_cases(cases, wire, place.world_size, &control);
    if (place.rank == 0) return lines;
    return std::nullopt;
  } catch (const WorldError& failure) {
    control.fail(failure.what(), failure.hint());
    throw;
  }
}

std::string in_group(const std::vector<Case>& cases, const std::string& wire, int processes) {
  const bool threads = wire == "threads";
  const GroupEnd end = run_group(
      threads ? 1 : processes, [&](Control& control) { return train_cases(cases, wire, processes, threads ? nullptr : &control); },
      kPatience_s, 3600);
  INFO((end.failure ? end.failure->message : ""));
  for (const std::string& text : end.texts) CHECK(first_difference(end.texts.front(), text) == "");
  return end.texts.front();
}

}  // namespace

TEST_CASE("one wire's part of the campaign", "[.campaign]") {
  const char* wanted = std::getenv("SHARDLAB_CAMPAIGN");
  REQUIRE(wanted != nullptr);
  std::istringstream words(wanted);
  std::string wire, file;
  int processes = 0, every = 0;
  REQUIRE((words >> wire >> processes >> every >> file));
  const std::vector<Case> cases = campaign_cases(every);
  const auto lines = wire == "mpi" ? in_job(cases, wire, processes) : in_group(cases, wire, processes);
  if (!lines) return;
  CHECK(lines->find("refused: ") == std::string::npos);
  CHECK(lines->find(" state ") != std::string::npos);
  std::ofstream(file) << *lines;
}

}  // namespace shardlab::testing
