// A generated grid of legal cases: every combination of what changes a plan's shape, with sizes and options dealt to them.
#pragma once

#include <string>
#include <vector>

#include "plan/case.h"
#include "tests/namespaces.h"

namespace shardlab::testing {

/// A few thousand cases that `check` accepts, the same on every run and dealt once a run.
const std::vector<Case>& legal_cases();

/// Of `cases` those that this run takes: one of `sample` by the hash of the name, all when thorough (tests/deal.h).
std::vector<Case> sample_of(const std::vector<Case>& cases, uint64_t sample);

/// One line that tells a case from every other of the grid.
std::string line_of(const Case& c);

}  // namespace shardlab::testing
