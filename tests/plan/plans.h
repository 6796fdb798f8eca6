// Small plans, as text and at random, that the tests of plan/ share.
#pragma once

#include <string>
#include <vector>

#include "plan/plan.h"
#include "tests/namespaces.h"

namespace shardlab::testing {

/// The plan of `text`; the test fails where it does not parse.
Plan parsed(const std::string& text);

/// Two data-parallel ranks train one linear layer: segments, a bucket with views, an overlapped reduction.
std::string small_plan_text();

/// A well-formed program of one role: allocations nested at random, segments with locals, ops on several streams with views.
Plan random_plan(uint64_t seed);

}  // namespace shardlab::testing
