// One plan on both levels: op by op, and by segments.
#pragma once

#include <memory>
#include <vector>

#include "benchmarks/gpt3.h"
#include "plan/case.h"
#include "plan/plan.h"
#include "plan/program.h"
#include "plan/trace.h"
#include "simulator/interpreter/cost_model.h"
#include "simulator/interpreter/segments/segments.h"
#include "tests/namespaces.h"

namespace shardlab::testing {

struct OpByOp {
  double seconds = 0;
  int rank = 0;  ///< the longest
  Breakdown breakdown;
  IdleBreakdown idle;
};

/// `simulate` with one representative a stage.
OpByOp op_by_op(const Plan& plan, const std::vector<Program>& programs, const Machine& machine, const PlacedCostModel& costs);

/// A lowered case with its programs; pointers stay valid when it is moved.
struct Lowered {
  std::unique_ptr<Plan> plan;
  std::vector<Program> programs;
};
Lowered lowered(const Case& c);

/// Requires that both say the same of every figure, to `tolerance` of the step.
void require_same(const OpByOp& ops, const SegmentStep& segments, double tolerance);

}  // namespace shardlab::testing
