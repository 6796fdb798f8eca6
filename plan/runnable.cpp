#include "plan/runnable.h"

#include <fmt/format.h>

namespace shardlab {
namespace {

Error counted(const std::string& owner, const std::string& name) {
  return {ExitCode::kUsage,
          fmt::format("{}%{} holds as many rows as a count says at run time, and every row of it would be computed", owner, name),
          "give the rows that the plan computes as its extent, and no count",
          {}};
}

}  // namespace

Result<void> check_runnable(const Plan& plan) {
  for (const Segment& segment : plan.segments)
    for (const Slot& slot : segment.slots)
      if (slot.count) return counted(fmt::format("segment `{}`: ", segment.name), slot.name);
  for (size_t role = 0; role < plan.roles.size(); ++role)
    for (const Buffer& buffer : plan.roles[role].buffers)
      if (buffer.count >= 0) return counted(fmt::format("role {}: ", role), buffer.name);
  return {};
}

}  // namespace shardlab
