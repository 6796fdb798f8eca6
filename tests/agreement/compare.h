// One case at both resolutions.
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
  bool exact = false;  ///< the estimate says that its bytes are the plan's
  bool timed = false;  ///< its time is the closed form of the executor's step, not that of a framework like it

  /// Of the analytic step time, relative to the timeline's.
  double error() const { return analytic_s / timeline_s - 1; }
};

/// Both predictions of a legal case. Throws where one of them refuses it.
Compared compare(const Case& c);

/// "gpt L2 h1024 ... | dp2 tp1 ...": what sets the case apart.
std::string line_of_case(const Case& c);

}  // namespace shardlab::testing
