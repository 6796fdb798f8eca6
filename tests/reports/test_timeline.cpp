#include <fmt/format.h>

#include <cmath>
#include <map>

#include "plan/text.h"
#include "reports/timeline.h"
#include "tests/namespaces.h"
#include "tests/reports/sample.h"
#include "tests/test.h"

using namespace shardlab;
using namespace shardlab::testing;

namespace {

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
  const Plan plan = plan_of_calls(1);
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
  const Plan plan = plan_of_calls(1);
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
  const Plan plan = plan_of_calls(1);
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

namespace {

/// What is drawn of a lane of calls, in nanoseconds: the rules of reports/timeline_calls.h said once more.
struct Drawn {
  std::string op;
  int64_t begin_ns, end_ns, peer_wait_ns;
  bool wait;
};

std::vector<Drawn> drawn(const Timeline& t, const TimelineLane& lane) {
  std::vector<Drawn> all;
  for (const TimelineCall& c : lane.calls) {
    const CallShape& shape = t.calls.shapes[static_cast<size_t>(c.shape)];
    const std::string call =
        fmt::format("layers.{} m{} {}", c.layer, c.micro_batch, t.calls.segments[static_cast<size_t>(shape.segment)]);
    bool works = false;
    for (size_t k = 0; k < shape.ops.size(); ++k) {
      const ShapeOp& op = shape.ops[k];
      Drawn d{call + " " + t.ops[static_cast<size_t>(op.op)].label, c.origin_ns + op.begin_ns, 0, op.peer_wait_ns, op.wait};
      if (op.wait && !works) d.begin_ns -= c.peer_wait_ns;
      d.end_ns = d.begin_ns + op.lasts_ns;
      if (op.wait && k == 0) d.begin_ns -= c.wait_ns;
      if (!op.wait && !works) d.begin_ns -= c.peer_wait_ns, d.peer_wait_ns = c.peer_wait_ns, works = true;
      all.push_back(d);
    }
  }
  return all;
}

struct Simulated {
  Plan plan;
  std::vector<Program> programs{expand_program(plan, 0)};
  Trace trace = trace_of_calls(programs[0]);
};

}  // namespace

TEST_CASE("calls of a simulated step draw every op and wait at its nanosecond, and share what is alike") {
  Simulated s{plan_of_calls(40)};
  const Timeline t = make_timeline(s.plan, s.programs, &s.trace, nullptr);
  CHECK(t.left_out == 0);
  CHECK(t.shown_s == 0);
  REQUIRE(t.lanes.size() == 2);
  CHECK(t.lanes[0].alike == 2);  // rank 1 does the same
  CHECK(t.lanes[0].stream == "compute");
  CHECK(t.lanes[1].stream == "comm");
  CHECK(t.ops.size() == 31);
  // The first call, which does not wait; calls of thirty ops; those whose last takes longer; the message.
  CHECK(t.calls.shapes.size() == 4);
  CHECK(t.calls.segments == std::vector<std::string>{"layer.F"});
  for (size_t stream : {0, 1}) {
    std::vector<const TraceEvent*> events;
    for (const TraceEvent& e : s.trace.events)
      if (e.rank == 0 && e.stream == static_cast<int>(stream)) events.push_back(&e);
    const std::vector<Drawn> all = drawn(t, t.lanes[stream]);
    REQUIRE(all.size() == events.size());
    for (size_t k = 0; k < all.size(); ++k) {
      const TraceEvent& e = *events[k];
      CAPTURE(k);
      CHECK(all[k].op == describe(s.plan, s.programs[0].instructions[static_cast<size_t>(e.instruction)]));
      CHECK(all[k].wait == (e.kind == TraceEvent::Kind::kWait));
      CHECK(std::abs(static_cast<double>(all[k].begin_ns) - e.begin * 1e9) <= 1.01);
      CHECK(std::abs(static_cast<double>(all[k].end_ns) - e.end * 1e9) <= 1.01);
      CHECK(std::abs(static_cast<double>(all[k].peer_wait_ns) - e.peer_wait * 1e9) <= 0.51);
    }
  }
}

TEST_CASE("a rank that differs by a nanosecond has lanes of its own") {
  Simulated s{plan_of_calls(40)};
  s.trace.events.back().end += 1e-9;
  const Timeline t = make_timeline(s.plan, s.programs, &s.trace, nullptr);
  REQUIRE(t.lanes.size() == 4);
  CHECK(t.lanes[0].alike == 1);
  CHECK(t.lanes[2].rank == 1);
  // Without room for a second rank all that it does is left out.
  CHECK(make_timeline(s.plan, s.programs, &s.trace, nullptr, {.max_ranks = 1}).left_out == 40 * 32 + 39);
}

TEST_CASE("shapes beyond the limit are not placed, those of the fewest calls, and say what they hold") {
  Simulated s{plan_of_calls(40)};
  const Timeline t = make_timeline(s.plan, s.programs, &s.trace, nullptr, {.max_shape_ops = 2 + 31});
  std::map<size_t, int> placed;
  for (const TimelineCall& c : t.lanes[0].calls) ++placed[t.calls.shapes[static_cast<size_t>(c.shape)].ops.size()];
  CHECK(placed == std::map<size_t, int>{{0, 5}, {31, 35}});  // the first call, and every tenth
  for (const TimelineCall& c : t.lanes[0].calls) {
    const CallShape& shape = t.calls.shapes[static_cast<size_t>(c.shape)];
    if (!shape.ops.empty()) continue;
    CHECK(shape.count == 30);
    CHECK(shape.busy_ns == 465'000 + (shape.lead_ns == 0 && c.wait_ns > 0 ? 5000 : 0));
    CHECK(shape.end_ns == shape.busy_ns);
  }
}

TEST_CASE("calls beyond the limit are left out from a moment on, which the timeline says") {
  Simulated s{plan_of_calls(40)};
  const Timeline t = make_timeline(s.plan, s.programs, &s.trace, nullptr, {.max_calls = 20});
  CHECK(t.lanes[0].calls.size() + t.lanes[1].calls.size() == 20);
  CHECK(t.shown_s > 0);
  int64_t shown = 0;
  for (const TimelineLane& lane : t.lanes) shown += static_cast<int64_t>(drawn(t, lane).size());
  CHECK(shown + t.left_out == static_cast<int64_t>(s.trace.events.size()) / 2);
}
