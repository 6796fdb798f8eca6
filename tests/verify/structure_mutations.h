// Mutations of a plan's structure: who meets whom, which layer and micro-batch a call works for, what crosses a boundary,
// where experts lie.
#pragma once

#include "tests/namespaces.h"
#include "tests/verify/backward_mutations.h"

namespace shardlab::testing {

void mutate_structure(const Plan& plan, const Jury& jury);

}  // namespace shardlab::testing
