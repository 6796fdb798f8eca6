// Exact timelines of small plans under fixed costs.

#include <fmt/format.h>

#include <map>

#include "simulator/interpreter/cost_model.h"
#include "simulator/interpreter/timeline.h"
#include "tests/namespaces.h"
#include "tests/simulator/plans.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

using namespace testing;

/// `compute` ops a, b, c one after the other; b's input is a's result, and so on.
constexpr const char* kSerial = R"(shardlab plan 1
name serial
mesh dp={}
streams compute

segment s
  bound %x activation f32[16]
  bound %y activation f32[16]

  copy a (%x) -> (%y)
  copy b (%y) -> (%x)
  copy c (%x) -> (%y)

role 0
  %x activation f32[16] persistent
  %y activation f32[16] persistent
  call s (x=%x, y=%y)
)";

std::string serial(int ranks) { return fmt::format(fmt::runtime(kSerial), ranks); }

double bubble_of(const Expanded& e, const Trace& trace, int rank) {
  return analyse(*e.plan, e.programs, trace, rank, 0).bubble_fraction;
}

}  // namespace

TEST_CASE("one stream runs its ops one after the other") {
  const Expanded e = expanded(serial(1));
  FixedCostModel costs;
  costs.seconds = {{"a", 1}, {"b", 2}, {"c", 0.5}};
  for (const Machine& machine : {shared_cores(1), own_devices()}) {
    const Trace trace = simulate(*e.plan, e.programs, machine, costs);
    CHECK(timeline(e, trace) ==
          "rank 0 compute 0 1 a\n"
          "rank 0 compute 1 3 b\n"
          "rank 0 compute 3 3.5 c\n");
    CHECK(step_seconds(trace) == Approx(3.5));
  }
}

TEST_CASE("ranks that meet wait for the slower of unsteady cores, and one rank waits for nobody") {
  // 400 times: an op of a second on each rank, then a sum of both that takes no time.
  constexpr int kMeetings = 400;
  const auto text = [&](int ranks) {
    std::string plan = fmt::format(R"(shardlab plan 1
name meetings
mesh dp={}
streams compute
comm all axes dp

segment s
  bound %x activation f32[16]
  bound %g gradient f32[16] dp:P
  local %sum gradient f32[16] view %g

  copy a (%x) -> (%g)
  all_reduce meet (%g) -> (%sum) comm=all algorithm=ring

role 0
  %x activation f32[16] persistent
  %g gradient f32[16] dp:P persistent
)",
                                   ranks);
    for (int i = 0; i < kMeetings; ++i) plan += "  call s (x=%x, g=%g)\n";
    return plan;
  };
  const auto seconds = [&](int ranks, double unsteady, const Machine& machine) {
    const Expanded e = expanded(text(ranks));
    FixedCostModel costs;
    costs.seconds = {{"a", 1}, {"meet", 0}};
    costs.unsteady = unsteady;
    return step_seconds(simulate(*e.plan, e.programs, machine, costs));
  };
  CHECK(seconds(2, 0, shared_cores(2)) == Approx(kMeetings));
  // The later of two independent normal times: its mean lies 1 / sqrt(pi) = 0.564 deviations above theirs; of four 1.03.
  const double late = seconds(2, 0.1, shared_cores(2)) / kMeetings - 1;
  CHECK(late == Approx(0.0564).epsilon(0.1));
  CHECK(seconds(4, 0.1, shared_cores(4)) / kMeetings - 1 == Approx(0.103).epsilon(0.1));
  CHECK(seconds(2, 0.05, shared_cores(2)) / kMeetings - 1 == Approx(late / 2).epsilon(0.02));
  CHECK(seconds(2, 9, shared_cores(2)) == seconds(2, 0.25, shared_cores(2)));  // no op takes less than no time
  CHECK(seconds(1, 0.1, shared_cores(2)) == Approx(kMeetings));
  CHECK(seconds(2, 0.1, own_devices()) == Approx(kMeetings));
}

TEST_CASE("dispatch is core time before each op on a local machine") {
  const Expanded e = expanded(serial(1));
  FixedCostModel costs;
  costs.dispatch_s = 0.25;
  CHECK(timeline(e, simulate(*e.plan, e.programs, shared_cores(1), costs)) ==
        "rank 0 compute 0.25 1.25 a\n"
        "rank 0 compute 1.5 2.5 b\n"
        "rank 0 compute 2.75 3.75 c\n");
}

TEST_CASE("a device waits for the host only where launching is slower than running") {
  const Expanded e = expanded(serial(1));
  FixedCostModel costs;
  costs.dispatch_s = 0.25;
  CHECK(timeline(e, simulate(*e.plan, e.programs, own_devices(), costs)) ==
        "rank 0 compute 0.25 1.25 a\n"
        "rank 0 compute 1.25 2.25 b\n"
        "rank 0 compute 2.25 3.25 c\n");
  costs.seconds = {{"a", 0.0625}, {"b", 0.5}, {"c", 0.0625}};
  CHECK(timeline(e, simulate(*e.plan, e.programs, own_devices(), costs)) ==
        "rank 0 compute 0.25 0.3125 a\n"
        "rank 0 compute 0.5 1 b\n"
        "rank 0 compute 1 1.0625 c\n");
}

TEST_CASE("ranks of a machine with one GPU share it: their ops slow one another, their collective is one") {
  const Expanded e = expanded(kOverlap);
  FixedCostModel costs;
  costs.seconds = {{"reduce", 3}};
  Machine gpu = shared_cores(1);
  Calibration launched;
  launched.launch_ahead = true;
  gpu.calibration = std::make_shared<const Calibration>(launched);
  const Trace trace = simulate(*e.plan, e.programs, gpu, costs);
  CHECK(timeline(e, trace) ==
        "rank 0 compute 0 2 a\n"
        "rank 0 comm 0 2 (reduce)\n"
        "rank 0 comm 2 5 reduce\n"
        "rank 0 compute 2 4 b\n"
        "rank 0 compute 4 5 (c)\n"
        "rank 0 compute 5 7 c\n"
        "rank 1 compute 0 2 a\n"
        "rank 1 comm 0 2 (reduce)\n"
        "rank 1 comm 2 5 reduce\n"
        "rank 1 compute 2 4 b\n"
        "rank 1 compute 4 5 (c)\n"
        "rank 1 compute 5 7 c\n");
  gpu.cores = 2;
  CHECK(step_seconds(simulate(*e.plan, e.programs, gpu, costs)) == Approx(5));  // a device each
}

TEST_CASE("a collective on its own stream overlaps what does not need it") {
  const Expanded e = expanded(kOverlap);
  FixedCostModel costs;
  costs.seconds = {{"reduce", 3}, {"b", 2}};
  const Trace trace = simulate(*e.plan, e.programs, own_devices(), costs);
  CHECK(timeline(e, trace) ==
        "rank 0 compute 0 1 a\n"
        "rank 0 comm 0 1 (reduce)\n"
        "rank 0 comm 1 4 reduce\n"
        "rank 0 compute 1 3 b\n"
        "rank 0 compute 3 4 (c)\n"
        "rank 0 compute 4 5 c\n"
        "rank 1 compute 0 1 a\n"
        "rank 1 comm 0 1 (reduce)\n"
        "rank 1 comm 1 4 reduce\n"
        "rank 1 compute 1 3 b\n"
        "rank 1 compute 3 4 (c)\n"
        "rank 1 compute 4 5 c\n");
  const Breakdown b = analyse(*e.plan, e.programs, trace, 1, 0);
  CHECK(b.wall_s == Approx(5));
  CHECK(b.compute_s == Approx(4));
  CHECK(b.comm_s == Approx(3));
  CHECK(b.exposed_comm_s == Approx(1));
  CHECK(b.unplanned_s == Approx(0).margin(1e-12));
}

TEST_CASE("a stream that slept is woken later, one that waited less than that was still spinning") {
  const Expanded e = expanded(kOverlap);
  FixedCostModel costs;
  costs.wake_s = 0.5;
  costs.seconds = {{"reduce", 3}, {"b", 3.25}};
  const Trace trace = simulate(*e.plan, e.programs, own_devices(), costs);
  // reduce sleeps from 0 to 1 and is woken at 1.5; c waits from 4.25 to 4.5 only, and goes on after as much again.
  const std::string rank0 = timeline(e, trace).substr(0, timeline(e, trace).find("rank 1"));
  CHECK(rank0 ==
        "rank 0 compute 0 1 a\n"
        "rank 0 comm 0 1.5 (reduce)\n"
        "rank 0 compute 1 4.25 b\n"
        "rank 0 comm 1.5 4.5 reduce\n"
        "rank 0 compute 4.25 4.75 (c)\n"
        "rank 0 compute 4.75 5.75 c\n");
}

TEST_CASE("ranks that outnumber the cores take turns") {
  FixedCostModel costs;
  costs.seconds = {{"a", 1}, {"b", 2}, {"c", 0.5}};
  const auto step = [&](int ranks, int cores) {
    const Expanded e = expanded(serial(ranks));
    return step_seconds(simulate(*e.plan, e.programs, shared_cores(cores), costs));
  };
  CHECK(step(2, 2) == Approx(3.5));
  CHECK(step(4, 2) == Approx(7));
  CHECK(step(3, 2) == Approx(5.5));  // op by op: half a second in which one core has nothing left
  costs.turn_s = 2.5;                // b begins within a turn that a began
  CHECK(step(3, 2) == Approx(6.5));  // rank 2 begins when another has done b
  costs.turn_s = 0;
  costs.handover_s = 0.25;
  CHECK(step(2, 2) == Approx(3.5));
  CHECK(step(2, 1) == Approx(7 + 7 * 0.25));  // as both begin, and a a b b c c
  costs.contention = 0.5;                     // both cores busy: half as slow again
  costs.handover_s = 0;
  CHECK(step(1, 2) == Approx(3.5));
  CHECK(step(4, 2) == Approx(10.5));
}

TEST_CASE("an overlapped collective takes cores from compute") {
  const Expanded e = expanded(kOverlap);
  FixedCostModel costs;
  costs.seconds = {{"reduce", 2}, {"b", 2}};
  // The collective goes first. Rank 0 finds nobody there yet and its core goes to its b; rank 1 reads from 1 to 2 and finds that
  // nobody has read from it; rank 0 does so from 2 to 3 on the other core, which both then share for their second step, because b
  // of rank 1 has the core that is free by then.
  const Trace trace = simulate(*e.plan, e.programs, shared_cores(2), costs);
  CHECK(timeline(e, trace) ==
        "rank 0 compute 0 1 a\n"
        "rank 0 comm 0 1 (reduce)\n"
        "rank 0 comm 1 5 reduce peers 2\n"
        "rank 0 compute 1 3 b\n"
        "rank 0 compute 5 6 c\n"
        "rank 1 compute 0 1 a\n"
        "rank 1 comm 0 1 (reduce)\n"
        "rank 1 comm 1 5 reduce\n"
        "rank 1 compute 3 5 b\n"
        "rank 1 compute 5 6 c\n");
}

/// One rank of two streams: b runs beside what c needs.
constexpr const char* kBeside = R"(shardlab plan 1
name beside
mesh dp=1
streams compute side

segment s
  bound %x activation f32[16]
  bound %y activation f32[16]
  bound %z activation f32[16]

  copy a (%x) -> (%y)
  copy aside (%y) -> (%x) @side
  copy b (%y) -> (%z)
  copy c (%x) -> (%z)

role 0
  %x activation f32[16] persistent
  %y activation f32[16] persistent
  %z activation f32[16] persistent
  call s (x=%x, y=%y, z=%z)
)";

TEST_CASE("a core handed over costs a switch of threads, an idle one the waking of whoever slept") {
  const Expanded e = expanded(kBeside);
  FixedCostModel costs;
  costs.handover_s = 0.25;
  costs.wake_s = 0.5;
  const auto on = [&](int cores) { return timeline(e, simulate(*e.plan, e.programs, shared_cores(cores), costs)); };
  // The side stream goes first, to find that it must wait; then its op waits for no end of a turn.
  CHECK(on(1) ==
        "rank 0 side 0 1.5 (aside)\n"
        "rank 0 compute 0.25 1.25 a\n"
        "rank 0 side 1.5 2.5 aside\n"
        "rank 0 compute 2.75 3.75 b\n"
        "rank 0 compute 3.75 4.75 c\n");
  // c waits from 2 to 2.5 and watches meanwhile: it need not be woken.
  CHECK(on(2) ==
        "rank 0 compute 0 1 a\n"
        "rank 0 side 0 1.5 (aside)\n"
        "rank 0 compute 1 2 b\n"
        "rank 0 side 1.5 2.5 aside\n"
        "rank 0 compute 2 2.5 (c)\n"
        "rank 0 compute 2.5 3.5 c\n");
}

/// Ranks that reduce first thing, and then compute.
std::string reduces(int ranks, const char* algorithm) {
  return fmt::format(R"(shardlab plan 1
name reduces
mesh dp={}
streams compute
comm grads axes dp

segment s
  bound %g gradient f32[16] dp:P
  local %sum gradient f32[16] view %g

  all_reduce reduce (%g) -> (%sum) comm=grads algorithm={}
  copy a (%sum) -> (%sum)

role 0
  %g gradient f32[16] dp:P persistent
  call s (g=%g)
)",
                     ranks, algorithm);
}

TEST_CASE("a meeting of more ranks than cores goes on step by step") {
  FixedCostModel costs;
  costs.seconds = {{"reduce", 12}, {"a", 0}};
  const auto step = [&](int ranks, const char* algorithm, int cores) {
    const Expanded e = expanded(reduces(ranks, algorithm));
    return step_seconds(simulate(*e.plan, e.programs, shared_cores(cores), costs));
  };
  for (const char* algorithm : {"ring", "direct", "halving-doubling"}) {
    INFO(algorithm);
    CHECK(step(2, algorithm, 2) == Approx(12));
    CHECK(step(4, algorithm, 4) == Approx(12));
    CHECK(step(4, algorithm, 2) == Approx(24));  // no core is ever idle
    CHECK(step(4, algorithm, 1) == Approx(48));
  }
  // Each of the steps of the ring hands both cores on twice, but the last its second time.
  costs.handover_s = 0.5;
  CHECK(step(4, "ring", 4) == Approx(12));
  CHECK(step(4, "ring", 2) > 24 + 6 * 0.5);
}

TEST_CASE("a drive takes no core") {
  const Expanded e = expanded(R"(shardlab plan 1
name drive
mesh dp=1
streams compute drive

segment s
  bound %x activation f32[1024]
  bound %y activation f32[1024]
  bound %h activation f32[1024] host
  bound %n activation f32[1024] nvme

  copy store (%h) -> (%n) @drive
  copy a (%x) -> (%y)
  copy b (%x) -> (%y)

role 0
  %x activation f32[1024] persistent
  %y activation f32[1024] persistent
  %h activation f32[1024] host persistent
  %n activation f32[1024] nvme persistent
  call s (x=%x, y=%y, h=%h, n=%n)
)");
  FixedCostModel costs;
  costs.seconds = {{"store", 1.5}, {"a", 2}, {"b", 2}};
  costs.dispatch_s = 0.25;
  costs.handover_s = 0.125;
  // The drive's stream goes first, leaves the core for a, and has it between a and b.
  CHECK(timeline(e, simulate(*e.plan, e.programs, shared_cores(1), costs)) ==
        "rank 0 drive 0.25 2.75 store\n"
        "rank 0 compute 0.625 2.625 a\n"
        "rank 0 compute 3.125 5.125 b\n");
  CHECK(timeline(e, simulate(*e.plan, e.programs, shared_cores(2), costs)) ==
        "rank 0 drive 0.25 1.75 store\n"
        "rank 0 compute 0.25 2.25 a\n"
        "rank 0 compute 2.5 4.5 b\n");
}

TEST_CASE("the bubble of 1F1B and of all-forward-all-backward is (p - 1) / (m + p - 1)") {
  FixedCostModel costs;
  costs.otherwise = 0;
  costs.seconds = {{"F", 1}, {"B", 1}};
  for (const bool one_f_one_b : {true, false})
    for (const int p : {1, 2, 3, 4})
      for (const int m : {1, 2, 4, 7}) {
        INFO("p " << p << " m " << m << " 1f1b " << one_f_one_b);
        const Expanded e = pipeline(p, m, one_f_one_b);
        const Trace trace = simulate(*e.plan, e.programs, own_devices(), costs);
        CHECK(step_seconds(trace) == Approx(2.0 * (m + p - 1)));
        CHECK(longest_rank(trace) == 0);
        CHECK(bubble_of(e, trace, 0) == Approx(static_cast<double>(p - 1) / (m + p - 1)).margin(1e-12));
      }
}

TEST_CASE("two stages of 1F1B, event by event") {
  const Expanded e = pipeline(2, 2, true);
  FixedCostModel costs;
  costs.otherwise = 0.5;
  costs.seconds = {{"F", 1}, {"B", 2}};
  const Trace trace = simulate(*e.plan, e.programs, own_devices(), costs);
  // The messages take half a second each. Stage 1 has F0 B0 F1 B1; stage 0 F0 F1 B0 B1.
  CHECK(timeline(e, trace) ==
        "rank 0 compute 0 1 F\n"
        "rank 0 fwd.out 0 1 (send.y)\n"
        "rank 0 bwd.in 0 5 recv.dy peers 4.5\n"
        "rank 0 fwd.out 1 1.5 send.y\n"
        "rank 0 compute 1 2 F\n"
        "rank 0 fwd.out 1.5 2 (send.y)\n"
        "rank 0 fwd.out 2 2.5 send.y\n"
        "rank 0 compute 2 5 (B)\n"
        "rank 0 compute 5 7 B\n"
        "rank 0 bwd.in 5 8 recv.dy peers 2.5\n"
        "rank 0 compute 7 8 (B)\n"
        "rank 0 compute 8 10 B\n"
        "rank 1 fwd.in 0 1.5 recv.x peers 1\n"
        "rank 1 compute 0 1.5 (F)\n"
        "rank 1 bwd.out 0 4.5 (send.dx)\n"
        "rank 1 compute 1.5 2.5 F\n"
        "rank 1 fwd.in 1.5 2.5 recv.x peers 0.5\n"
        "rank 1 compute 2.5 4.5 B\n"
        "rank 1 bwd.out 4.5 5 send.dx\n"
        "rank 1 compute 4.5 5.5 F\n"
        "rank 1 bwd.out 5 7.5 (send.dx)\n"
        "rank 1 compute 5.5 7.5 B\n"
        "rank 1 bwd.out 7.5 8 send.dx\n");
}

TEST_CASE("only the hops between nodes pay the network") {
  // Four stages on two nodes of two devices: stages 0 and 1 share a node, and so do 2 and 3.
  Machine m;
  m.nodes = 2;
  m.device.peak_flops = {{"fp32", 1e12}};
  m.device.memory_bytes_per_s = 1e15;
  m.device.link_bytes_per_s = 64e6;  // 64 bytes take a microsecond
  m.inter_bytes_per_s = 16e6;
  Efficiency f;
  f.link = f.network = 1;
  f.step_latency_s = f.network_latency_s = f.launch_s = f.wake_s = 0;
  for (const int replicas : {1, 2, 32}) {
    INFO(replicas << " replicas of each stage");
    Expanded e = pipeline(4, 1, true);
    if (replicas > 1) e.plan->mesh.axes.push_back({"dp", replicas});
    m.devices_per_node = 2 * replicas;
    const Trace trace = simulate(*e.plan, e.programs, m, DatasheetCostModel(m, Precision::kFp32, f));
    std::map<std::pair<int, std::string>, double> moved;
    for (const TraceEvent& event : trace.events) {
      const int stage = event.rank / replicas;
      const Instruction& i = e.programs[static_cast<size_t>(stage)].instructions[static_cast<size_t>(event.instruction)];
      if (event.kind == TraceEvent::Kind::kOp) moved[{stage, i.op->label}] = event.end - event.begin - event.peer_wait;
    }
    for (const auto& [stage, label, seconds] : std::vector<std::tuple<int, std::string, double>>{
             {1, "recv.x", 1e-6}, {2, "recv.x", 4e-6}, {3, "recv.x", 1e-6}, {2, "recv.dy", 1e-6}, {1, "recv.dy", 4e-6}}) {
      INFO("stage " << stage << " " << label);
      CHECK(moved[{stage, label}] == Approx(seconds));
    }
  }
}

TEST_CASE("a representative takes the time of the slowest whom it stands for") {
  // Three replicas of a stage on nodes of four devices: the first lies on one node with its neighbour, the second does not.
  Machine m;
  m.devices_per_node = 4;
  m.nodes = 2;
  m.device.peak_flops = {{"fp32", 1e12}};
  m.device.memory_bytes_per_s = 1e15;
  m.device.link_bytes_per_s = 64e6;
  m.inter_bytes_per_s = 16e6;
  Efficiency f;
  f.link = f.network = 1;
  f.step_latency_s = f.network_latency_s = f.launch_s = f.wake_s = 0;
  Expanded e = pipeline(2, 1, true);
  e.plan->mesh.axes.push_back({"dp", 3});
  const DatasheetCostModel costs(m, Precision::kFp32, f);
  const double each = step_seconds(simulate(*e.plan, e.programs, m, costs));
  const double representative = step_seconds(simulate(*e.plan, e.programs, m, costs, {.max_individual_ranks = 1}));
  CHECK(each == Approx(8e-6).epsilon(1e-3));
  CHECK(representative == Approx(each));
}

TEST_CASE("large meshes are simulated by one rank a role") {
  FixedCostModel costs;
  costs.otherwise = 0;
  costs.seconds = {{"F", 1}, {"B", 1}};
  const Expanded small = pipeline(3, 4, true);
  Expanded large = pipeline(3, 4, true);
  large.plan->mesh.axes.push_back({"dp", 64});
  const Trace few = simulate(*small.plan, small.programs, own_devices(), costs);
  const Trace many = simulate(*large.plan, large.programs, own_devices(), costs);
  CHECK(many.world_size == 192);
  CHECK(many.events.size() == few.events.size());
  CHECK(step_seconds(many) == Approx(step_seconds(few)));
  REQUIRE(many.step_interval.size() == 192);
  CHECK(many.step_interval[130][1] == many.step_interval[128][1]);
  // Joined with itself every instruction counts for the 64 ranks of its role.
  const auto rows = join(*large.plan, large.programs, many, many);
  REQUIRE(!rows.empty());
  for (const JoinedOp& row : rows) {
    CHECK(row.predicted_s == row.measured_s);
    if (row.label.find(" F F ") != std::string::npos) CHECK(row.predicted_s == Approx(64));
  }
}

}  // namespace shardlab::testing
