// Folds over hand-made traces, with exact figures.

#include "tests/namespaces.h"
#include "tests/simulator/plans.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

using namespace testing;

/// Two stages; stage 1 receives on a stream of its own, computes, and reduces its result.
constexpr const char* kPlan = R"(shardlab plan 1
name "hand \"made\""
mesh pp=2
streams compute in
comm fwd axes pp

segment out
  bound %x activation f32[16]

  copy make (%x) -> (%x)
  send send (%x) -> () comm=fwd

segment work
  bound %x activation f32[16]
  bound %y activation f32[16]

  recv recv () -> (%x) comm=fwd @in
  copy first (%y) -> (%y)
  copy second (%x) -> (%y)

role 0
  %x activation f32[16] persistent
  call out (x=%x)

role 1
  %x activation f32[16] persistent
  %y activation f32[16] persistent
  call work (x=%x, y=%y)
)";

TraceEvent event(TraceEvent::Kind kind, int rank, int instruction, int stream, double begin, double end, double peer_wait = 0) {
  TraceEvent e;
  e.kind = kind;
  e.rank = rank;
  e.instruction = instruction;
  e.stream = stream;
  e.begin = begin;
  e.end = end;
  e.peer_wait = peer_wait;
  return e;
}

constexpr auto kOp = TraceEvent::Kind::kOp;
constexpr auto kWait = TraceEvent::Kind::kWait;

Trace hand_made() {
  Trace t;
  t.producer = "hand";
  t.world_size = 2;
  t.steps = 1;
  t.streams = {"compute", "in"};
  t.step_interval = {{0, 6}, {0, 10}};
  t.events = {
      event(kOp, 0, 0, 0, 0.5, 4),   event(kOp, 0, 1, 0, 4, 6),
      event(kOp, 1, 0, 1, 0, 6, 4),   // recv: the sender is there at 4, the data at 6
      event(kOp, 1, 1, 0, 0.25, 2),   // first
      event(kWait, 1, 2, 0, 2, 6.5),  // second waits for recv and is woken at 6.5
      event(kOp, 1, 2, 0, 6.5, 9),
  };
  return t;
}

}  // namespace

TEST_CASE("a breakdown is made of unions of intervals") {
  const Expanded e = expanded(kPlan);
  const Breakdown b = analyse(*e.plan, e.programs, hand_made(), 1, 0);
  CHECK(b.wall_s == Approx(10));
  CHECK(b.compute_s == Approx(1.75 + 2.5));
  CHECK(b.comm_s == Approx(6));
  CHECK(b.exposed_comm_s == Approx(6 - 1.75));
  CHECK(b.wait_s == Approx(0.5));                      // 6 to 6.5: covered by no op
  CHECK(b.unplanned_s == Approx(1));                   // 9 to 10
  CHECK(b.bubble_fraction == Approx((4 - 2) / 10.0));  // from the wait's begin to the sender's arrival
  const Breakdown first = analyse(*e.plan, e.programs, hand_made(), 0, 0);
  CHECK(first.compute_s == Approx(3.5));
  CHECK(first.exposed_comm_s == Approx(2));
  CHECK(first.unplanned_s == Approx(0.5));
  CHECK(first.bubble_fraction == 0);
}

namespace {

/// One rank that computes, sends a tensor to host memory and gets it back; `make` copies within the device.
constexpr const char* kParking = R"(shardlab plan 1
name "parking"
mesh dp=1
streams compute d2h h2d

segment work
  bound %x activation f32[16]
  bound %y activation f32[16]
  bound %h activation f32[16] host

  copy make (%x) -> (%y)
  copy out (%x) -> (%h) @d2h
  copy more (%y) -> (%y)
  copy back (%h) -> (%x) @h2d
  copy last (%x) -> (%y)

role 0
  %x activation f32[16] persistent
  %y activation f32[16] persistent
  %h activation f32[16] host persistent
  call work (x=%x, y=%y, h=%h)
)";

Trace of_one_rank(double end, std::vector<TraceEvent> events) {
  Trace t;
  t.producer = "hand";
  t.world_size = 1;
  t.steps = 1;
  t.streams = {"compute", "d2h", "h2d"};
  t.step_interval = {{0, end}};
  t.events = std::move(events);
  return t;
}

}  // namespace

TEST_CASE("copies between spaces are exposed where nothing computes; copies within one are compute") {
  const Expanded e = expanded(kParking);
  // With overlap: out runs beside `more`, and half a second longer; back is hidden but for a second.
  const Trace beside =
      of_one_rank(9, {event(kOp, 0, 0, 0, 0, 2), event(kOp, 0, 1, 1, 2, 5.5), event(kOp, 0, 2, 0, 2, 5),
                      event(kWait, 0, 3, 2, 2, 5.5), event(kOp, 0, 3, 2, 5.5, 6.5), event(kOp, 0, 4, 0, 6.5, 8.5)});
  const Breakdown with = analyse(*e.plan, e.programs, beside, 0, 0);
  CHECK(with.compute_s == Approx(2 + 3 + 2));
  CHECK(with.copy_s == Approx(3.5 + 1));
  CHECK(with.exposed_copy_s == Approx(0.5 + 1));
  CHECK(with.unplanned_s == Approx(0.5));
  // Without: one after the other, all of it exposed.
  const Trace serial = of_one_rank(11.5, {event(kOp, 0, 0, 0, 0, 2), event(kOp, 0, 1, 1, 2, 5.5), event(kOp, 0, 2, 0, 5.5, 8.5),
                                          event(kOp, 0, 3, 2, 8.5, 9.5), event(kOp, 0, 4, 0, 9.5, 11.5)});
  const Breakdown without = analyse(*e.plan, e.programs, serial, 0, 0);
  CHECK(without.compute_s == Approx(7));
  CHECK(without.copy_s == Approx(4.5));
  CHECK(without.exposed_copy_s == Approx(4.5));
  for (const Breakdown& b : {with, without})
    CHECK(b.wall_s == Approx(b.compute_s + b.exposed_comm_s + b.exposed_copy_s + b.wait_s + b.unplanned_s));
}

TEST_CASE("what communication covers of a copy is communication's") {
  const Expanded e = expanded(kPlan);
  const Breakdown b = analyse(*e.plan, e.programs, hand_made(), 1, 0);
  CHECK(b.copy_s == 0);
  CHECK(b.exposed_copy_s == 0);
  CHECK(b.wall_s == Approx(b.compute_s + b.exposed_comm_s + b.wait_s + b.unplanned_s));
}

TEST_CASE("idleness of a trace without launches is put down to peers, dependencies and the step's end") {
  const Expanded e = expanded(kPlan);
  const IdleBreakdown idle = idle_by_cause(*e.plan, e.programs, hand_made(), 1, 0);
  CHECK(idle.idle_s == Approx(0.25 + 2 + 0.5 + 1));
  CHECK(idle.peer_s == Approx(2));          // 2 to 4: the receive has no sender yet
  CHECK(idle.dependency_s == Approx(0.5));  // 6 to 6.5: the receive is through, its waiter not yet woken
  CHECK(idle.tail_s == Approx(1));
  CHECK(idle.other_s == Approx(0.25));  // before the first op
  CHECK(idle.host_s + idle.latency_s == 0);
}

TEST_CASE("overlapping and nested intervals count once, and the step's interval clips") {
  const Expanded e = expanded(kPlan);
  Trace t = hand_made();
  t.step_interval[1] = {1, 8};
  t.events[4] = event(kWait, 1, 2, 0, 1.5, 7);
  const Breakdown b = analyse(*e.plan, e.programs, t, 1, 0);
  CHECK(b.wall_s == Approx(7));
  CHECK(b.compute_s == Approx(1 + 1.5));
  CHECK(b.comm_s == Approx(5));
  CHECK(b.exposed_comm_s == Approx(4));
  CHECK(b.wait_s == Approx(0.5));
  CHECK(b.unplanned_s == Approx(0).margin(1e-12));
}

TEST_CASE("a join takes medians over steps and leaves peer waits out") {
  const Expanded e = expanded(kPlan);
  Trace measured = hand_made();
  measured.steps = 3;
  measured.events = {event(kOp, 1, 0, 1, 0, 6, 4), event(kOp, 1, 0, 1, 0, 6, 5), event(kOp, 1, 0, 1, 0, 6, 0)};
  const auto rows = join(*e.plan, e.programs, hand_made(), measured);
  REQUIRE(rows.size() == 5);
  CHECK(rows[0].role == 0);
  CHECK(rows[0].predicted_s == Approx(3.5));
  CHECK(rows[0].measured_s == 0);
  CHECK(rows[2].role == 1);
  CHECK(rows[2].instruction == 0);
  CHECK(rows[2].predicted_s == Approx(2));
  CHECK(rows[2].measured_s == Approx(2));
  CHECK(rows[4].predicted_s == Approx(2.5));
}

TEST_CASE("Chrome JSON has one process a rank and one thread a stream") {
  const Expanded e = expanded(kPlan);
  Trace t = hand_made();
  t.events.resize(2);
  t.events[1].sent_bytes = 64;
  REQUIRE_GOLDEN("simulator/chrome.json", to_chrome_json(*e.plan, e.programs, t));
}

}  // namespace shardlab::testing
