#include "runtime/phases.h"

#include <fmt/format.h>

#include <algorithm>

namespace shardlab::runtime {

Result<RunState> take_state(const Session& session) {
  const auto names = session.states();
  if (!names.ok()) return names.error();
  RunState state;
  for (const StateName& name : *names) {
    auto value = session.state(name);
    if (!value.ok()) return value.error();
    state.emplace_back(name, std::move(*value));
  }
  return state;
}

Result<void> give_state(const RunState& state, Session& session) {
  const auto names = session.states();
  if (!names.ok()) return names.error();
  const bool alike = std::ranges::equal(
      *names, state, [](const StateName& a, const auto& b) { return a.parameter == b.first.parameter && a.part == b.first.part; });
  if (!alike)
    return Error{
        ExitCode::kBug,
        fmt::format("one phase of the run keeps {} things from step to step, the next {} or others", state.size(), names->size()),
        "report this with the case",
        {}};
  for (const auto& [name, value] : state) SHARDLAB_TRY(session.set_state(name, value));
  return {};
}

}  // namespace shardlab::runtime
