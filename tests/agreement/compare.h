// One case at both resolutions, and by the estimate that ranks layouts.
#pragma once

#include <cstdint>
#include <string>

#include "plan/case.h"
#include "tests/namespaces.h"

namespace shardlab::testing {

struct Compared {
  double timeline_s = 0, analytic_s = 0;
  int64_t timeline_peak = 0, analytic_peak = 0;
  int64_t timeline_wire = 0, analytic_wire = 0;
  /// By the estimate that ranks layouts of a search; 0 where a point cannot say the case.
  double estimated_s = 0;
  int64_t estimated_peak = 0;

  /// Of the analytic step time, relative to the timeline's.
  double error() const { return analytic_s / timeline_s - 1; }
};

/// Both predictions of a legal case. Throws where one of them refuses it, or, `verified`, where its plan does not verify.
Compared compare(const Case& c, bool verified);

/// "gpt L2 h1024 ... | dp2 tp1 ...": what sets the case apart.
std::string line_of_case(const Case& c);

}  // namespace shardlab::testing
