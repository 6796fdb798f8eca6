// The folds of a case's plan held to its naive replay.
#pragma once

#include <string>

#include "plan/case.h"
#include "plan/plan.h"
#include "tests/laws/replay.h"
#include "tests/namespaces.h"

namespace shardlab::testing {

/// The lowered plan; `verified` has `verify` prove it too, which takes most of the time.
Plan plan_of(const Case& c, bool verified = false);

/// Requires that the folds of the case's plan are those of its replay (`difference_from_replay`).
void require_equal(const Case& c, bool verified = false);

}  // namespace shardlab::testing
