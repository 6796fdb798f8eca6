#include "plan/text.h"
#include "reports/timeline.h"
#include "tests/namespaces.h"
#include "tests/test.h"

using namespace shardlab;
using namespace shardlab::testing;

namespace {

/// Two data-parallel ranks, one op: a Fill on the compute stream.
Plan fill_plan() {
  Plan plan;
  plan.name = "fill";
  plan.mesh.axes = {{"pp", 1}, {"dp", 2}};
  plan.streams = {"compute", "comm"};
  Slot slot;
  slot.name = "x";
  slot.type.shape = {16};
  slot.kind = SlotKind::kBound;
  Op op;
  op.work = Fill{1.0f};
  op.writes = {SlotId(0)};
  op.label = "one";
  plan.segments = {{"fill.F", {slot}, {op}}};
  Role role;
  Buffer buffer;
  buffer.name = "x";
  buffer.type = slot.type;
  buffer.persistent = true;
  role.buffers = {buffer};
  role.program = {Call{SegmentId(0), 3, 0, {BufferId(0)}}};
  plan.roles = {role};
  return plan;
}

TraceEvent event(int rank, int step, double begin, double end) {
  TraceEvent e;
  e.rank = rank;
  e.instruction = 0;
  e.step = step;
  e.begin = begin;
  e.end = end;
  return e;
}

}  // namespace

TEST_CASE("a timeline shows the median step, and predictions of a representative for every rank of its role") {
  const Plan plan = fill_plan();
  const std::vector<Program> programs{expand_program(plan, 0)};
  Trace measured;
  measured.world_size = 2;
  measured.steps = 3;
  measured.events = {event(0, 0, 0, 9), event(0, 1, 0, 2),   event(0, 2, 0, 1),
                     event(1, 0, 0, 9), event(1, 1, 0.5, 2), event(1, 2, 0, 1)};
  measured.step_interval = {{0, 9}, {0, 9}, {0, 2}, {0, 2}, {0, 1}, {0, 1}};
  Trace predicted;
  predicted.world_size = 2;
  predicted.steps = 1;
  predicted.events = {event(0, 0, 0, 1.5)};
  predicted.step_interval = {{0, 1.5}, {0, 1.5}};

  const Timeline t = make_timeline(plan, programs, &predicted, &measured);
  CHECK(t.measured_step == 1);
  REQUIRE(t.lanes.size() == 2);
  REQUIRE(t.ops.size() == 1);
  CHECK(t.ops[0].label == describe(plan, programs[0].instructions[0]));
  CHECK(t.ops[0].kind == "fill");
  CHECK(t.lanes[1].rank == 1);
  CHECK(t.lanes[1].stream == "compute");
  REQUIRE(t.lanes[1].measured.size() == 1);
  CHECK(t.lanes[1].measured[0].begin_s == 0.5);
  CHECK(t.lanes[1].measured[0].op == 0);
  REQUIRE(t.lanes[1].predicted.size() == 1);
  CHECK(t.lanes[1].predicted[0].end_s == 1.5);
  CHECK(t.left_out == 0);
}

TEST_CASE("a timeline above its limits leaves whole ranks out and counts what it left out") {
  const Plan plan = fill_plan();
  const std::vector<Program> programs{expand_program(plan, 0)};
  Trace measured;
  measured.world_size = 2;
  measured.steps = 1;
  measured.events = {event(0, 0, 0, 1), event(1, 0, 0, 1)};
  measured.step_interval = {{0, 1}, {0, 1}};
  CHECK(make_timeline(plan, programs, nullptr, &measured, {1, 100}).left_out == 1);
  const Timeline t = make_timeline(plan, programs, nullptr, &measured, {8, 1});
  CHECK(t.lanes.size() == 1);
  CHECK(t.left_out == 1);
}

TEST_CASE("a rank of more intervals than a timeline holds shows those that begin first, and says from when on none are shown") {
  const Plan plan = fill_plan();
  const std::vector<Program> programs{expand_program(plan, 0)};
  Trace measured;
  measured.world_size = 2;
  measured.steps = 1;
  for (int i = 0; i < 100; ++i) measured.events.push_back(event(0, 0, i, i + 1));
  measured.step_interval = {{0, 100}, {0, 100}};
  const Timeline t = make_timeline(plan, programs, nullptr, &measured, {8, 30});
  REQUIRE(t.lanes.size() == 1);
  CHECK(t.lanes[0].measured.size() == 30);
  CHECK(t.left_out == 70);
  CHECK(t.shown_s == 30);
}
