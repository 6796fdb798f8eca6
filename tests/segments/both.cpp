#include "tests/segments/both.h"

#include <cmath>
#include <numeric>
#include <stdexcept>

#include "simulator/interpreter/timeline.h"
#include "strategies/lower.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {

OpByOp op_by_op(const Plan& plan, const std::vector<Program>& programs, const Machine& machine, const PlacedCostModel& costs) {
  const Trace trace = simulate(plan, programs, machine, costs, {.max_individual_ranks = 1});
  OpByOp out;
  out.seconds = step_seconds(trace);
  out.rank = longest_rank(trace);
  out.breakdown = analyse(plan, programs, trace, out.rank, 0);
  out.idle = idle_by_cause(plan, programs, trace, out.rank, 0);
  return out;
}

Lowered lowered(const Case& c) {
  Result<Plan> plan = lower(c, {.after = {}, .verify = false});
  if (!plan.ok()) throw std::runtime_error(to_string(plan.error()));
  Lowered out{std::make_unique<Plan>(std::move(plan).value()), {}};
  for (size_t role = 0; role < out.plan->roles.size(); ++role)
    out.programs.push_back(expand_program(*out.plan, static_cast<int>(role)));
  return out;
}

void require_same(const OpByOp& ops, const SegmentStep& segments, double tolerance) {
  const double margin = tolerance * ops.seconds;
  const auto same = [&](const char* what, double a, double b) {
    INFO(what << ": " << a << " op by op, " << b << " by segments, of a step of " << ops.seconds);
    REQUIRE(std::abs(a - b) <= margin);
  };
  same("step", ops.seconds, segments.seconds);
  const Breakdown &a = ops.breakdown, &b = segments.breakdown;
  same("wall", a.wall_s, b.wall_s);
  same("compute", a.compute_s, b.compute_s);
  same("communication", a.comm_s, b.comm_s);
  same("exposed communication", a.exposed_comm_s, b.exposed_comm_s);
  same("copies", a.copy_s, b.copy_s);
  same("exposed copies", a.exposed_copy_s, b.exposed_copy_s);
  same("waits", a.wait_s, b.wait_s);
  same("unplanned", a.unplanned_s, b.unplanned_s);
  same("bubble", a.bubble_fraction * ops.seconds, b.bubble_fraction * ops.seconds);
  same("idle", ops.idle.idle_s, segments.idle.idle_s);
  same("idle for peers", ops.idle.peer_s, segments.idle.peer_s);
  const double exposed = std::accumulate(segments.exposed_by_comm_s.begin(), segments.exposed_by_comm_s.end(), 0.0);
  REQUIRE(exposed == Approx(b.exposed_comm_s).epsilon(1e-9).margin(1e-12 * ops.seconds));
}

}  // namespace shardlab::testing
