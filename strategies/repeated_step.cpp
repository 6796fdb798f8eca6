#include "strategies/repeated_step.h"

#include <fmt/format.h>

#include <algorithm>

namespace shardlab::strategies {

BufferId element_of(StageDraft& stage, BufferId of, int step) {
  Buffer one = stage.role.buffers[of.index()];
  one.name += fmt::format("@{}", step);
  one.type.shape = {1};
  one.persistent = false;
  one.view = View{of.value, step, {}};
  return add_buffer(stage, std::move(one));
}

void repeat_step(StageDraft& stage, const std::vector<Event>& step, int number, const std::map<BufferId, BufferId>& instead) {
  int slots = 0;
  for (const Event& event : step)
    if (event.computes()) slots = std::max(slots, event.slot + 1);
  for (Event event : step) {
    event.slot += number * slots;
    for (BufferId& id : event.call.binding)
      if (const auto found = instead.find(id); found != instead.end()) id = found->second;
    stage.events.push_back(std::move(event));
  }
}

}  // namespace shardlab::strategies
