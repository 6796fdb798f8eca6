// The schedules that tests of every one go through.
#pragma once

#include <vector>

#include "plan/pipeline_schedule.h"
#include "tests/namespaces.h"

namespace shardlab::testing {

/// Every schedule with a name that a pipeline of several stages can have, in the order of the table (plan/pipeline_orders.cpp): a new row
/// is in every such test.
inline std::vector<Schedule> pipeline_schedules() {
  std::vector<Schedule> all;
  for (int i = 0; i < named_schedules(); ++i)
    if (static_cast<Schedule>(i) != Schedule::kNone) all.push_back(static_cast<Schedule>(i));
  return all;
}

}  // namespace shardlab::testing
