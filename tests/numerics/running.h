// A case in execution beside its emulation: what the tests of tier E3 share.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "runtime/session.h"
#include "runtime/thread_transport.h"
#include "tests/namespaces.h"
#include "tests/numerics/matrix.h"

namespace shardlab::testing {

/// Compared as integers: -0 is not 0 here.
bool same_bits(std::span<const float> a, std::span<const float> b);

/// One of the matrix's untied subjects without dropout, which sums that are not the gradient leave finite: canonical, no overlap.
Case base_case(const std::string& subject, int dp, int accumulation);

/// The sequences of all ranks in one step, in order.
std::vector<int32_t> tokens_of(const Case& c, int64_t step);

/// A case in execution, with its plan, on a CPU back end which also checks that every kernel by name has the scratch that the plan
/// says it needs, to the byte.
struct Running {
  explicit Running(const Case& config);
  /// The same of another plan of the case: that of a run's first phase, say.
  Running(const Case& config, Result<Plan> plan);
  /// Memory and wire as they were are as the plan says, to the byte.
  void require_counts() const;

  RandomText source;
  ThreadTransport transport;
  PlacedPlan placed;
  std::unique_ptr<Session> session;
};

}  // namespace shardlab::testing
