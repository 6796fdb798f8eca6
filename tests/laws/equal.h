// The plan of a case held to its closed form.
#pragma once

#include "plan/case.h"
#include "plan/plan.h"

namespace shardlab::testing {

/// The lowered plan; `verified` has `verify` prove it too, which takes most of the time.
Plan plan_of(const Case& c, bool verified = false);

/// Peak, classes at the peak, persistent bytes of every stage and wire bytes of every channel: the plan's are the closed form's.
void require_equal(const Case& c, bool verified = false);

}  // namespace shardlab::testing
