// What is recorded of an execution, and what the system says of the process.
#include <fmt/format.h>

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>

#include "plan/text.h"
#include "plan/trace_steps.h"
#include "profiler/process.h"
#include "profiler/recorder.h"
#include "profiler/trace_file.h"
#include "profiler/trace_reader.h"
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
  REQUIRE(contains(lines[0], R"("producer":"executor","plan":")" + plan_digest(print(rig.plan()))));
  REQUIRE(contains(lines[0], fmt::format(R"("world_size":2,"steps":1,"events":{},"streams":["compute","comm"],"dropped":0)",
                                         trace.events.size())));
  int fills = 0;
  for (const std::string& line : lines)
    fills += contains(line, R"({"kind":"op","rank":1,"instruction":0,"op":"s one fill","stream":"compute","step":0,)");
  REQUIRE(fills == 1);
  REQUIRE(std::distance(std::filesystem::directory_iterator(folder.path), {}) == 1);  // no temporary file stays
  REQUIRE(contains(world_error([&] {
                     write_trace_lines((folder.path / "no" / "such" / "folder").string(), rig.plan(), rig.placed.programs, trace);
                   }),
                   "there is no folder " + (folder.path / "no" / "such").string()));
}

TEST_CASE("a trace takes the place of a planted link, and is not written through one", "[profiler]") {
  const Folder folder;
  CpuRecorder recorder(2, {"compute", "comm"}, 100);
  Rig rig(reduce_plan(), {.recorder = &recorder});
  rig.session->step(0);
  const Trace trace = recorder.take();
  for (const char* name : {"trace.jsonl", "trace.jsonl.gz"}) {
    const std::filesystem::path path = folder.path / name, victim = folder.path / "victim";
    std::ofstream(victim) << "precious";
    for (const char* planted : {"", ".part", ".new"}) std::filesystem::create_symlink(victim, path.string() + planted);
    std::filesystem::create_symlink(victim, fmt::format("{}.new-{}-0", path.string(), getpid()));
    write_trace_lines(path.string(), rig.plan(), rig.placed.programs, trace);
    std::ifstream file(victim);
    std::string kept;
    std::getline(file, kept);
    CHECK(kept == "precious");
    CHECK(std::filesystem::symlink_status(path).type() == std::filesystem::file_type::regular);
    CHECK(read_trace_lines(path.string()).ok());
  }
}

TEST_CASE("a packed trace reads back as it was, and one that is cut off is refused", "[profiler]") {
  const Folder folder;
  CpuRecorder recorder(2, {"compute", "comm"}, 100);
  Rig rig(reduce_plan(), {.recorder = &recorder});
  for (int64_t step = 0; step < 4; ++step) rig.session->step(step);
  const Trace trace = recorder.take();
  const std::string plain = (folder.path / "t.jsonl").string(), packed = plain + ".gz";
  const int64_t plain_bytes = write_trace_lines(plain, rig.plan(), rig.placed.programs, trace);
  const int64_t packed_bytes = write_trace_lines(packed, rig.plan(), rig.placed.programs, trace);
  CHECK(plain_bytes == static_cast<int64_t>(std::filesystem::file_size(plain)));
  CHECK(packed_bytes == static_cast<int64_t>(std::filesystem::file_size(packed)));
  CHECK(packed_bytes < plain_bytes / 4);
  for (const std::string& path : {plain, packed}) {
    const auto read = read_trace_lines(path);
    REQUIRE(read.ok());
    CHECK(read->plan == plan_digest(print(rig.plan())));
    CHECK(read_trace_plan(path).value() == read->plan);
    REQUIRE(read->trace.events.size() == trace.events.size());
    for (size_t i = 0; i < trace.events.size(); ++i) {
      CHECK(read->trace.events[i].instruction == trace.events[i].instruction);
      CHECK(read->trace.events[i].end == trace.events[i].end);
    }
    CHECK(read->trace.step_interval == trace.step_interval);
  }
  // Cut off anywhere, within a line or between two, packed or not.
  const auto contents = [](const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return std::string((std::istreambuf_iterator<char>(file)), {});
  };
  const std::string text = contents(plain), bytes = contents(packed);
  for (const size_t kept : {text.size() - 1, text.rfind('\n', text.size() - 2) + 1, text.find('\n') + 1, size_t{0}}) {
    write(plain, text.substr(0, kept));
    INFO(kept);
    CHECK(read_trace_lines(plain).ok() == (kept == text.size() - 1));  // the last line may lack its end
  }
  for (const size_t kept : {bytes.size() - 1, bytes.size() / 2, size_t{30}}) {
    write(packed, bytes.substr(0, kept));
    INFO(kept);
    const auto read = read_trace_lines(packed);
    REQUIRE_FALSE(read.ok());
    CHECK(contains(to_string(read.error()), "t.jsonl.gz:"));
  }
  write(plain,
        "{\"version\":1,\"producer\":\"x\",\"world_size\":1000000,\"steps\":1000000,\"streams\":[],\"dropped\":0,\"recorder_"
        "overhead_s\":0}\n");
  CHECK(contains(to_string(read_trace_lines(plain).error()), "1000000 ranks and 1000000 steps, where a trace has"));
}

TEST_CASE("a trace joins a plan by the text of its ops, whatever their numbers were", "[profiler]") {
  const Folder folder;
  CpuRecorder recorder(2, {"compute", "comm"}, 100);
  Rig rig(reduce_plan(), {.recorder = &recorder});
  rig.session->step(0);
  const Trace trace = recorder.take();
  const std::string path = (folder.path / "t.jsonl").string();
  write_trace_lines(path, rig.plan(), rig.placed.programs, trace);
  const auto joined = [&](const std::string& text) {
    const auto plan = parse_plan(text);
    REQUIRE(plan.ok());
    auto read = read_trace_lines(path);
    REQUIRE(read.ok());
    return join_by_text(std::move(*read), *plan, {expand_program(*plan, 0)});
  };
  const auto replaced = [](std::string text, const std::string& from, const std::string& to) {
    text.replace(text.find(from), from.size(), to);
    return text;
  };
  const JoinedTrace same = joined(reduce_plan());
  CHECK(same.left_out == 0);
  CHECK(same.trace.events.size() == trace.events.size());

  // An op more at the front: every number is another, and every event still lies on its op.
  const JoinedTrace shifted = joined(replaced(reduce_plan(), "  fill one", "  fill zero () -> (%x) value=0\n  fill one"));
  CHECK(shifted.left_out == 0);
  REQUIRE(shifted.trace.events.size() == trace.events.size());
  for (size_t i = 0; i < trace.events.size(); ++i) CHECK(shifted.trace.events[i].instruction == trace.events[i].instruction + 1);

  const JoinedTrace renamed = joined(replaced(reduce_plan(), "add twice", "add double"));
  CHECK(renamed.unknown == std::vector<std::string>{"s twice add"});
  CHECK(renamed.left_out == std::ranges::count(trace.events, 2, &TraceEvent::instruction));
  CHECK(renamed.left_out + static_cast<int64_t>(renamed.trace.events.size()) == static_cast<int64_t>(trace.events.size()));
  // Which of two ops of one text an event is of cannot be said.
  const JoinedTrace twice = joined(replaced(reduce_plan(), "  add twice (%y, %y) -> (%x)\n", ""));
  CHECK(twice.unknown == std::vector<std::string>{"s twice add"});
}

TEST_CASE("the median step is that of the longest rank, and alone it is step 0", "[profiler]") {
  Trace trace;
  trace.world_size = 2;
  trace.steps = 3;
  // From the first begin to the last end the steps take 9, 3 and 4; their longest ranks 5, 3 and 2.
  trace.step_interval = {{0, 5}, {4, 9}, {0, 3}, {0, 3}, {0, 2}, {2, 4}};
  for (int step = 0; step < 3; ++step) trace.events.push_back({.rank = 1, .instruction = step, .step = step});
  CHECK(median_step(trace) == 1);
  const Trace one = only_step(trace, 2);
  CHECK(one.steps == 1);
  CHECK(one.step_interval == std::vector<std::array<double, 2>>{{0, 2}, {2, 4}});
  REQUIRE(one.events.size() == 1);
  CHECK(one.events[0].instruction == 2);
  CHECK(one.events[0].step == 0);
  CHECK(median_step(Trace{}) == 0);
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
