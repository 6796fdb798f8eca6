// The pipeline's grid and the curve of live bytes, of a small plan by hand.
#include "plan/memory.h"
#include "plan/step_parts.h"
#include "reports/live_bytes.h"
#include "reports/pipeline_grid.h"
#include "tests/namespaces.h"
#include "tests/test.h"

using namespace shardlab;
using namespace shardlab::testing;

namespace {

/// One rank: forward of two micro-batches, their backward cut in I and W, and an update. Each call fills a local of its own.
Plan small_plan() {
  Plan plan;
  plan.name = "small";
  plan.mesh.axes = {{"pp", 1}};
  plan.streams = {"compute"};
  const auto segment = [](const std::string& name) {
    Slot slot;
    slot.name = "x";
    slot.type.shape = {1024};
    slot.kind = SlotKind::kBound;
    Op op;
    op.work = Fill{1.0f};
    op.writes = {SlotId(0)};
    op.label = "one";
    return Segment{name, {slot}, {op}};
  };
  plan.segments = {segment("layer.F"), segment("layer.I"), segment("layer.W"), segment("update0")};
  Role role;
  Buffer x;
  x.name = "layer0.x";
  x.type.shape = {1024};
  x.kind = BufferClass::kActivation;
  Buffer kept = x;
  kept.name = "layer0.w", kept.persistent = true, kept.kind = BufferClass::kParameter;
  role.buffers = {x, kept};
  role.program = {Call{SegmentId(0), 0, 0, {BufferId(1)}},  Alloc{BufferId(0)},
                  Call{SegmentId(0), 0, 1, {BufferId(0)}},  Call{SegmentId(1), 0, 0, {BufferId(0)}},
                  Call{SegmentId(2), 0, 0, {BufferId(0)}},  Free{BufferId(0)},
                  Call{SegmentId(3), -1, -1, {BufferId(1)}}};
  plan.roles = {role};
  return plan;
}

/// Every op takes a second, with half a second between.
Trace trace_of(const Program& program) {
  Trace trace;
  trace.world_size = 1;
  trace.steps = 1;
  double at = 0;
  for (const Instruction& i : program.instructions) {
    if (i.kind != Instruction::Kind::kRun) continue;
    TraceEvent e;
    e.instruction = i.id;
    e.begin = at, e.end = at + 1;
    trace.events.push_back(e);
    at += 1.5;
  }
  trace.step_interval = {{0, at}};
  return trace;
}

}  // namespace

TEST_CASE("slots of the grid are runs of work on one micro-batch in one phase") {
  const Plan plan = small_plan();
  const std::vector<Program> programs{expand_program(plan, 0)};
  const auto slots = grid_slots(plan, programs, trace_of(programs[0]), 0, 0, 0);
  REQUIRE(slots.size() == 5);
  const char phases[] = {'F', 'F', 'I', 'W', 'U'};
  const int micro_batches[] = {0, 1, 0, 0, -1};
  for (size_t k = 0; k < slots.size(); ++k) {
    CHECK(slots[k].phase == phases[k]);
    CHECK(slots[k].micro_batch == micro_batches[k]);
    CHECK(slots[k].begin_s == 1.5 * static_cast<double>(k));
    CHECK(slots[k].end_s == 1.5 * static_cast<double>(k) + 1);
  }
}

TEST_CASE("live bytes change where buffers are allocated and freed, and their peak is the plan's") {
  const Plan plan = small_plan();
  const std::vector<Program> programs{expand_program(plan, 0)};
  const LiveCurve curve = live_curve(plan, programs, trace_of(programs[0]), 0, 0, 0);
  CHECK(curve.peak_bytes == memory_peak(plan, 0)[static_cast<size_t>(Space::kDevice)].peak_bytes);
  REQUIRE(curve.points.size() == 3);
  CHECK(curve.points[0].at_s == 0);
  CHECK(curve.points[0].bytes.total() == 4096);
  CHECK(curve.points[1].at_s == 1);  // the op before the allocation ends
  CHECK(curve.points[1].bytes.total() == 8192);
  CHECK(curve.points[2].bytes.total() == 4096);
  REQUIRE(curve.items.size() == 2);
  CHECK(curve.items[0].bytes == 4096);
  // However few points are kept, the peak is one of them.
  LiveOptions few;
  few.max_points = 2;
  int64_t highest = 0;
  for (const LiveBytes& p : live_curve(plan, programs, trace_of(programs[0]), 0, 0, 0, few).points)
    highest = std::max(highest, p.bytes.total());
  CHECK(highest == curve.peak_bytes);
}

TEST_CASE("the parts of a step add up to it") {
  const Plan plan = small_plan();
  const std::vector<Program> programs{expand_program(plan, 0)};
  const StepParts parts = parts_of_step(plan, programs, trace_of(programs[0]), 0, 0);
  CHECK(parts.compute_s == 4);
  CHECK(parts.update_s == 1);
  CHECK(parts.unplanned_s == 2.5);
  CHECK(parts.total() == 7.5);
}
