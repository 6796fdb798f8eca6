#include "plan/period.h"

#include <algorithm>
#include <map>
#include <tuple>

namespace shardlab {

std::vector<int32_t> steps_of_calls(const Plan& plan, const Role& role) {
  std::vector<int32_t> steps(role.program.size(), 0);
  if (plan.period == 1) return steps;
  std::map<std::tuple<int32_t, int, int, std::vector<int32_t>>, int32_t> seen;
  for (size_t i = 0; i < role.program.size(); ++i) {
    const Call* call = std::get_if<Call>(&role.program[i]);
    if (call == nullptr) continue;
    std::vector<int32_t> buffers;
    if (call->micro_batch < 0)
      for (const BufferId id : call->binding) buffers.push_back(id.value);
    const int32_t n = seen[{call->segment.value, call->layer, call->micro_batch, std::move(buffers)}]++;
    steps[i] = std::min(n, plan.period - 1);
  }
  return steps;
}

IdleBreakdown idle_of_step(const Plan& plan, IdleBreakdown idle) {
  for (double IdleBreakdown::*part :
       {&IdleBreakdown::idle_s, &IdleBreakdown::peer_s, &IdleBreakdown::dependency_s, &IdleBreakdown::host_s,
        &IdleBreakdown::latency_s, &IdleBreakdown::tail_s, &IdleBreakdown::other_s})
    idle.*part /= plan.period;
  return idle;
}

}  // namespace shardlab
