// From op intervals to a trace that every report folds: waits, peers, launches, idleness and the export.
#include "plan/intervals.h"
#include "profiler/trace_file.h"
#include "profiler/trace_reader.h"
#include "tests/namespaces.h"
#include "tests/profiler_gpu/hand_made.h"
#include "tests/test.h"

#include <unistd.h>

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

namespace shardlab::testing::of_assemble {

namespace {

constexpr auto kWait = TraceEvent::Kind::kWait;
constexpr auto kOp = TraceEvent::Kind::kOp;

const TraceEvent* find(const Trace& trace, TraceEvent::Kind kind, int rank, int instruction, int step = 0) {
  for (const TraceEvent& e : trace.events)
    if (e.kind == kind && e.rank == rank && e.instruction == instruction && e.step == step) return &e;
  return nullptr;
}

/// Step 3 of the two ranks at 100 s: rank 0 reduces from 2 on, rank 1 arrives at 4; both end at 6.
HostSide reduce_run() {
  HostSide host;
  host.world_size = 2;
  host.steps = {host_step(3, 100, 10, 2)};
  for (const int rank : {0, 1})
    for (const int i : {0, 1, 2}) host.launches.push_back({{3, rank, i}, 100 + 0.5 * i + 0.25});
  host.sent = {{{3, 0, 1}, 24}};
  return host;
}
std::vector<OpInterval> reduce_ops() {
  return {{{3, 0, 0}, 101, 102},   {{3, 0, 1}, 102, 106}, {{3, 0, 2}, 106.5, 108},
          {{3, 1, 0}, 101, 103.5}, {{3, 1, 1}, 104, 106}, {{3, 1, 2}, 107, 109}};
}

}  // namespace

TEST_CASE("intervals: union, common part, difference", "[profiler_gpu]") {
  const Intervals a = unite({{3, 4}, {0, 1}, {0.5, 2}, {9, 8}, {-1, 0.25}}, {0, 10});
  CHECK(a == Intervals{{0, 2}, {3, 4}});
  CHECK(length(a) == 3);
  CHECK(common(a, {{1, 3.5}}) == 1.5);
  CHECK(without(a, {{1, 3.5}}) == Intervals{{0, 1}, {3.5, 4}});
  CHECK(without({{0, 10}}, {{-1, 1}, {2, 3}, {9, 12}}) == Intervals{{1, 2}, {3, 9}});
  CHECK(without(a, {}) == a);
  CHECK(without(a, {{0, 4}}).empty());
}

TEST_CASE("a trace has an event per op, waits from the plan's edges, and peers' waits from both sides", "[profiler_gpu]") {
  const Expanded e = reduce_plan();
  const Trace t = assemble(*e.plan, e.programs, reduce_run(), reduce_ops(), {});
  CHECK(t.steps == 1);
  CHECK(t.streams == std::vector<std::string>{"compute", "comm"});
  REQUIRE(t.step_interval.size() == 2);
  CHECK(t.accounting.ops == 6);
  CHECK(t.accounting.ops_untimed == 0);

  const TraceEvent* sum = find(t, kOp, 0, 1);
  REQUIRE(sum != nullptr);
  CHECK(sum->begin == Approx(2));
  CHECK(sum->end == Approx(6));
  CHECK(sum->stream == 1);
  CHECK(sum->sent_bytes == 24);
  CHECK(sum->peer_wait == Approx(2));  // rank 1 arrives at 4
  CHECK(sum->queued == Approx(1.25));  // launched at 0.75
  CHECK(find(t, kOp, 1, 1)->peer_wait == 0);

  // "twice" was free to run when "one" had ended, at 2, and ready when "sum" had, at 6.
  const TraceEvent* wait = find(t, kWait, 0, 2);
  REQUIRE(wait != nullptr);
  CHECK(wait->stream == 0);
  CHECK(wait->begin == Approx(2));
  CHECK(wait->end == Approx(6));
  // "sum" of rank 0 is first on its stream: it waited from the step's begin to the end of "one".
  REQUIRE(find(t, kWait, 0, 1) != nullptr);
  CHECK(find(t, kWait, 0, 1)->begin == Approx(0));
  CHECK(find(t, kWait, 0, 1)->end == Approx(2));
  CHECK(find(t, kWait, 0, 0) == nullptr);

  int last = 0;
  for (const TraceEvent& event : t.events) CHECK(event.rank >= std::exchange(last, event.rank));

  const Breakdown b = analyse(*e.plan, e.programs, t, 0, 0);
  CHECK(b.compute_s == Approx(2.5));
  CHECK(b.comm_s == Approx(4));
  CHECK(b.exposed_comm_s == Approx(4));
  CHECK(b.wall_s == 10);
  CHECK(b.unplanned_s == Approx(10 - 6.5 - b.wait_s));
}

TEST_CASE("a wait ends where its op begins, even if the clocks' error has the dependency end later", "[profiler_gpu]") {
  const Expanded e = reduce_plan();
  std::vector<OpInterval> ops = reduce_ops();
  for (OpInterval& o : ops)
    if (o.op == OpKey{3, 0, 2}) o.begin = 105.75;  // "sum" ends at 106
  const Trace t = assemble(*e.plan, e.programs, reduce_run(), ops, {});
  REQUIRE(find(t, kWait, 0, 2) != nullptr);
  CHECK(find(t, kWait, 0, 2)->end == Approx(5.75));
}

TEST_CASE("work that one rank hands over for several is the op of each", "[profiler_gpu]") {
  const Expanded e = reduce_plan();
  HostSide host = reduce_run();
  std::erase_if(host.launches, [](const HostSide::Launch& l) { return l.op == OpKey{3, 1, 1}; });
  host.carried = {{{3, 1, 1}, {3, 0, 1}, 101.5}};
  std::vector<OpInterval> ops = reduce_ops();
  std::erase_if(ops, [](const OpInterval& o) { return o.op == OpKey{3, 1, 1}; });
  const Trace t = assemble(*e.plan, e.programs, host, ops, {});
  const TraceEvent* carried = find(t, kOp, 1, 1);
  REQUIRE(carried != nullptr);
  CHECK(carried->begin == Approx(2));
  CHECK(carried->end == Approx(6));
  CHECK(carried->queued == Approx(0.5));
  CHECK(carried->peer_wait == 0);
  CHECK(t.accounting.ops == 6);
}

TEST_CASE("an op without a time is counted, and nobody is said to have waited for it", "[profiler_gpu]") {
  const Expanded e = reduce_plan();
  std::vector<OpInterval> ops = reduce_ops();
  std::erase_if(ops, [](const OpInterval& o) { return o.op == OpKey{3, 1, 1}; });
  const Trace t = assemble(*e.plan, e.programs, reduce_run(), ops, {});
  CHECK(t.accounting.ops == 6);
  CHECK(t.accounting.ops_untimed == 1);
  CHECK(find(t, kOp, 1, 1) == nullptr);
  CHECK(find(t, kOp, 0, 1)->peer_wait == 0);
  REQUIRE(unexplained(t.accounting).size() == 1);
  CHECK(unexplained(t.accounting)[0] == "1 of 6 ops have no time of the device");
}

TEST_CASE("a receive waits for its sender, and the pipeline's bubble is that", "[profiler_gpu]") {
  const Expanded e = pipeline_plan();
  HostSide host;
  host.world_size = 2;
  host.steps = {host_step(0, 50, 10, 2)};
  for (const int rank : {0, 1})
    for (int i = 0; i < (rank == 0 ? 2 : 3); ++i) host.launches.push_back({{0, rank, i}, 50});
  // Rank 1 posts its receive at 1; the sender begins at 4; both end at 5.
  const std::vector<OpInterval> ops{
      {{0, 0, 0}, 50.5, 54}, {{0, 0, 1}, 54, 55}, {{0, 1, 0}, 51, 55}, {{0, 1, 1}, 50.5, 52}, {{0, 1, 2}, 55.5, 59}};
  const Trace t = assemble(*e.plan, e.programs, host, ops, {});
  CHECK(find(t, kOp, 1, 0)->peer_wait == Approx(3));
  CHECK(find(t, kOp, 0, 1)->peer_wait == 0);
  const Breakdown b = analyse(*e.plan, e.programs, t, 1, 0);
  CHECK(b.bubble_fraction == Approx((4 - 2) / 10.0));  // "second" waits from 2; the sender is there at 4
  CHECK(b.exposed_comm_s == Approx(3));

  const IdleBreakdown idle = idle_by_cause(*e.plan, e.programs, t, 1, 0);
  CHECK(idle.idle_s == Approx(0.5 + 2 + 0.5 + 1));
  CHECK(idle.latency_s == Approx(0.5 + 0.5));  // before "first" and after the receive: launched, free to run
  CHECK(idle.peer_s == Approx(2));
  CHECK(idle.tail_s == Approx(1));
  CHECK(idle.host_s == 0);
}

TEST_CASE("idleness is put down to the op that ends it", "[profiler_gpu]") {
  const Expanded e = reduce_plan();
  HostSide host = reduce_run();
  // Rank 0's add is launched late, at 7; its device takes it up at 7.5.
  for (HostSide::Launch& l : host.launches)
    if (l.op == OpKey{3, 0, 2}) l.time = 107;
  std::vector<OpInterval> ops = reduce_ops();
  for (OpInterval& o : ops)
    if (o.op == OpKey{3, 0, 2}) o.begin = 107.5;
  const Trace t = assemble(*e.plan, e.programs, host, ops, {});
  const IdleBreakdown idle = idle_by_cause(*e.plan, e.programs, t, 0, 0);
  CHECK(idle.host_s == Approx(0.25 + 1));       // before the first launch, and from 6 to 7
  CHECK(idle.latency_s == Approx(0.75 + 0.5));  // 0.25 to 1, 7 to 7.5
  CHECK(idle.peer_s == Approx(2));              // in the collective, 2 to 4
  CHECK(idle.tail_s == Approx(2));
  CHECK(idle.dependency_s == 0);
  CHECK(idle.other_s == 0);
  CHECK(idle.idle_s == Approx(idle.host_s + idle.latency_s + idle.peer_s + idle.tail_s));

  Trace cpu = t;  // without launch times the rest is not known
  for (TraceEvent& event : cpu.events) event.queued = -1;
  const IdleBreakdown unknown = idle_by_cause(*e.plan, e.programs, cpu, 0, 0);
  CHECK(unknown.idle_s == Approx(idle.idle_s));
  CHECK(unknown.host_s == 0);
  CHECK(unknown.other_s == Approx(1 + 1.5));
  // Rank 1: from the end of "one" at 3.5 to its arrival at 4 the collective was there, its peer not.
  CHECK(idle_by_cause(*e.plan, e.programs, t, 1, 0).peer_s == Approx(0.5));
}

TEST_CASE("a wait that outlasts what it waits for is a dependency's", "[profiler_gpu]") {
  const Expanded e = reduce_plan();
  Trace t;
  t.world_size = 2;
  t.steps = 1;
  t.streams = {"compute", "comm"};
  t.step_interval = {{0, 10}, {0, 10}};
  t.events = {{.instruction = 0, .begin = 0, .end = 2},
              {.instruction = 1, .stream = 1, .begin = 2, .end = 5},
              {.kind = kWait, .instruction = 2, .begin = 2, .end = 6},  // woken a second late
              {.instruction = 2, .begin = 6, .end = 10}};
  const IdleBreakdown idle = idle_by_cause(*e.plan, e.programs, t, 0, 0);
  CHECK(idle.idle_s == Approx(1));
  CHECK(idle.dependency_s == Approx(1));
  CHECK(idle_by_cause(*e.plan, e.programs, t, 1, 0).tail_s == 10);  // nothing ran there
}

TEST_CASE("the export lays overlapping details over several tracks and stays JSON", "[profiler_gpu]") {
  const Expanded e = reduce_plan();
  Trace t = assemble(*e.plan, e.programs, reduce_run(), reduce_ops(), {});
  t.producer = "cupti";
  t.detail_lanes = {"gpu 0 stream 7", "overhead"};
  t.detail_names = {"kernel<\"a\", '\\b'>", "buffer flush"};
  t.details = {
      {0, 0, 0, 0, 0, 1.0, 1.75, 64}, {0, 0, 0, 0, 0, 1.5, 2.0, 0}, {0, 1, 0, 0, 0, 2.0, 6.0, 0}, {-1, -1, 0, 1, 1, 9.0, 9.5, 0}};
  const std::string text = to_chrome_json(*e.plan, e.programs, t);
  REQUIRE_GOLDEN("profiler/gpu_trace.json", text);
  const auto json = nlohmann::json::parse(text);
  std::map<std::pair<int, int>, double> end;  // by process and thread
  for (const auto& event : json.at("traceEvents")) {
    if (event.at("ph") != "X") continue;
    double& last = end[{event.at("pid"), event.at("tid")}];
    CHECK(event.at("ts").get<double>() >= last);
    last = event.at("ts").get<double>() + event.at("dur").get<double>();
  }
  t.events.clear();
  CHECK(nlohmann::json::parse(to_chrome_json(*e.plan, e.programs, t)).at("traceEvents").size() == 8);
}

TEST_CASE("queue times and the accounting survive a trace file", "[profiler_gpu]") {
  const Expanded e = reduce_plan();
  TraceAccounting a;
  a.clock = "CUPTI";
  a.clock_error_s = 1.25e-7;
  a.launches = 9, a.recorded = 7, a.lost = 2, a.dropped = 3, a.unreadable = 1, a.device_records = 8, a.timed = 4,
  a.zero_timestamp = 1;
  a.out_of_range = 2, a.unclaimed = 1;
  const Trace t = assemble(*e.plan, e.programs, reduce_run(), reduce_ops(), a);
  const std::string path = (std::filesystem::temp_directory_path() / ("shardlab-gpu-" + std::to_string(getpid()))).string();
  write_trace_lines(path, *e.plan, e.programs, t);
  const auto recorded = read_trace_lines(path);
  std::filesystem::remove(path);
  REQUIRE(recorded.ok());
  const Trace* read = &recorded->trace;
  CHECK(unexplained(read->accounting) == unexplained(t.accounting));
  CHECK(read->accounting.clock == "CUPTI");
  CHECK(read->accounting.clock_error_s == 1.25e-7);
  CHECK(read->accounting.ops == 6);
  CHECK(read->accounting.out_of_range == 2);
  CHECK(read->dropped == 3);
  REQUIRE(read->events.size() == t.events.size());
  for (size_t i = 0; i < t.events.size(); ++i) CHECK(read->events[i].queued == t.events[i].queued);
}

}  // namespace shardlab::testing::of_assemble
