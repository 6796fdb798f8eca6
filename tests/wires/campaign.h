// Cases that train on every wire, and what each wire must make of them: one line a case, everything exact.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "plan/case.h"
#include "runtime/control.h"
#include "tests/namespaces.h"

namespace shardlab::testing {

/// A sample of all pairs of strategies that go together, on the small model: each strategy stands in many. Every `every`-th pair.
std::vector<Case> campaign_cases(int every = 5);

/// A case after a few steps on a wire ("threads", "processes", "tcp", "gloo", "mpi"): its losses, and of each rank the peaks of all spaces and the
/// bytes of each communicator; last a SHA-256 over all state, gathered.
std::string train_case(const Case& c, const std::string& wire, Control* control);

/// The lines of those cases that `processes` can share out.
std::string train_cases(std::span<const Case> cases, const std::string& wire, int processes, Control* control);

/// The first line in which two texts differ; empty: none.
std::string first_difference(const std::string& want, const std::string& have);

}  // namespace shardlab::testing
