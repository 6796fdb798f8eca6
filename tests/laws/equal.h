// The plan of a case held to its closed form.
#pragma once

#include <string>

#include "plan/case.h"
#include "plan/plan.h"
#include "tests/namespaces.h"

namespace shardlab::testing {

/// The lowered plan; `verified` has `verify` prove it too, which takes most of the time.
Plan plan_of(const Case& c, bool verified = false);

/// The first of: bytes by class at the peak in each space, peak, persistent bytes of each stage, wire bytes of each channel, in
/// which the plan differs from the case's closed form. Empty where they are equal.
std::string difference_from_closed_form(const Plan& plan, const Case& c);

/// Requires that there is no such difference.
void require_equal(const Case& c, bool verified = false);

}  // namespace shardlab::testing
