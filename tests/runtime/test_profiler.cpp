// What is recorded of an execution, and what the system says of the process.
#include <fmt/format.h>

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>

#include "profiler/process.h"
#include "profiler/recorder.h"
#include "profiler/trace_file.h"
#include "tests/namespaces.h"
#include "tests/runtime/rig.h"
#include "tests/test.h"

namespace shardlab::testing {

namespace {

std::string reduce_plan() {
  return plan_head(1, 2, 1) + R"(comm dp axes dp
segment s
  bound %x other f32[6] dp:P
  local %y other f32[6] view %x
  fill one () -> (%x) value=1
  all_reduce sum (%x) -> (%y) comm=dp @comm
  add twice (%y, %y) -> (%x)
role 0
  %x other f32[6] dp:P persistent
  call s (x=%x)
)";
}

/// A folder of this test's own, removed at the end.
struct Folder {
  std::filesystem::path path = std::filesystem::temp_directory_path() / fmt::format("shardlab-test-{}", getpid());
  Folder() { std::filesystem::create_directories(path); }
  ~Folder() { std::filesystem::remove_all(path); }
};

void write(const std::filesystem::path& path, const std::string& text) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream(path) << text;
}

}  // namespace

TEST_CASE("every instruction of every step is recorded once, in its step's interval, with its bytes", "[profiler]") {
  CpuRecorder recorder(2, {"compute", "comm"}, 100);
  Rig rig(reduce_plan(), {.recorder = &recorder});
  recorder.set_on(false);
  rig.session->step(0);
  recorder.set_on(true);
  for (int64_t step = 1; step <= 3; ++step) rig.session->step(step);
  const Trace trace = recorder.take();
  REQUIRE(trace.steps == 3);
  REQUIRE(trace.dropped == 0);
  REQUIRE(trace.step_interval.size() == 6);
  REQUIRE(trace.recorder_overhead_s > 0);
  std::set<std::tuple<int, int, int>> seen;
  int64_t sent = 0;
  for (const TraceEvent& e : trace.events) {
    const auto& interval = trace.step_interval[static_cast<size_t>(e.step * 2 + e.rank)];
    REQUIRE(e.begin >= interval[0]);
    REQUIRE(e.begin <= e.end);
    REQUIRE(e.end <= interval[1]);
    REQUIRE(e.peer_wait <= e.end - e.begin);
    sent += e.sent_bytes;
    if (e.kind == TraceEvent::Kind::kOp) REQUIRE(seen.insert({e.rank, e.step, e.instruction}).second);
  }
  REQUIRE(seen.size() == 2 * 3 * 3);
  REQUIRE(sent == 3 * 2 * 6 * 4);  // a ring of two sends n (g-1)/g twice
  REQUIRE(recorder.take().events.empty());
}

TEST_CASE("events that do not fit are dropped and counted", "[profiler]") {
  CpuRecorder recorder(1, {"compute"}, 2);
  for (int i = 0; i < 5; ++i) recorder.record({.instruction = i});
  const Trace trace = recorder.take();
  REQUIRE(trace.events.size() == 2);
  REQUIRE(trace.dropped == 3);
}

TEST_CASE("traces are written whole or not at all", "[profiler]") {
  const Folder folder;
  CpuRecorder recorder(2, {"compute", "comm"}, 100);
  Rig rig(reduce_plan(), {.recorder = &recorder});
  rig.session->step(0);
  const Trace trace = recorder.take();
  const std::string path = (folder.path / "trace.jsonl").string();
  write_trace_lines(path, rig.plan(), rig.placed.programs, trace);
  std::ifstream file(path);
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  REQUIRE(lines.size() == 1 + 2 + trace.events.size());
  REQUIRE(contains(lines[0], R"("producer":"executor","world_size":2,"steps":1,"streams":["compute","comm"],"dropped":0)"));
  int fills = 0;
  for (const std::string& line : lines)
    fills += contains(line, R"({"kind":"op","rank":1,"instruction":0,"op":"s one fill","stream":"compute","step":0,)");
  REQUIRE(fills == 1);
  REQUIRE_FALSE(std::filesystem::exists(path + ".part"));
  REQUIRE(contains(world_error([&] {
                     write_trace_lines((folder.path / "no" / "such" / "folder").string(), rig.plan(), rig.placed.programs, trace);
                   }),
                   "cannot be written: No such file or directory"));
}

TEST_CASE("energy is summed over packages, wrapped counters put right", "[profiler]") {
  const Folder folder;
  const auto set = [&](const std::string& name, int64_t uj) {
    write(folder.path / name / "energy_uj", std::to_string(uj));
    write(folder.path / name / "max_energy_range_uj", "1000000");
  };
  set("intel-rapl:0", 900000);
  set("intel-rapl:1", 100000);
  set("intel-rapl:0:0", 5);  // a domain of package 0: already in its counter
  EnergyMeter meter(folder.path.string());
  set("intel-rapl:0", 100000);
  set("intel-rapl:1", 400000);
  set("intel-rapl:0:0", 900000);
  REQUIRE(meter.joules() == Approx(0.2 + 0.3));
  REQUIRE(meter.why_not().empty());
  meter.restart();
  REQUIRE(meter.joules() == 0.0);
  set("intel-rapl:1", 400250);
  REQUIRE(meter.joules() == Approx(250e-6));
  set("intel-rapl:2", 0);
  write(folder.path / "intel-rapl:2" / "name", "psys");  // the whole platform: counts the packages again
  EnergyMeter with_platform(folder.path.string());
  set("intel-rapl:2", 500000);
  REQUIRE(with_platform.joules() == 0.0);
}

TEST_CASE("energy that cannot be read has a reason and a remedy", "[profiler]") {
  const Folder folder;
  EnergyMeter none((folder.path / "none").string());
  REQUIRE(none.joules() == std::nullopt);
  REQUIRE(contains(none.why_not(), "there are no RAPL counters in"));
  write(folder.path / "intel-rapl:0" / "max_energy_range_uj", "1000000");
  EnergyMeter closed(folder.path.string());
  REQUIRE(closed.joules() == std::nullopt);
  REQUIRE(contains(closed.why_not(), "intel-rapl:0/energy_uj may not be read: run as root, or `sudo chmod a+r"));
  write(folder.path / "intel-rapl:0" / "energy_uj", "5");
  EnergyMeter lost(folder.path.string());
  std::filesystem::remove(folder.path / "intel-rapl:0" / "energy_uj");
  REQUIRE(lost.joules() == std::nullopt);
  REQUIRE(contains(lost.why_not(), "could be read no longer"));
}

TEST_CASE("the process has resident memory, which grows with what is touched", "[profiler]") {
  const ResidentMemory before = resident_memory();
  REQUIRE(before.now_bytes > 0);
  std::vector<char> touched(64 << 20, 1);
  const ResidentMemory after = resident_memory();
  REQUIRE(after.peak_bytes >= before.now_bytes + static_cast<int64_t>(touched.size()) / 2 + touched[12345] - 1);
}

}  // namespace shardlab::testing
