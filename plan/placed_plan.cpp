#include "plan/placed_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>

namespace shardlab {

PlacedPlan place(Plan plan) {
  PlacedPlan placed;
  placed.plan = std::make_unique<const Plan>(std::move(plan));
  for (size_t role = 0; role < placed.plan->roles.size(); ++role) {
    placed.programs.push_back(expand_program(*placed.plan, static_cast<int>(role)));
    placed.arenas.push_back(place_arena(*placed.plan, placed.programs.back()));
  }
  return placed;
}

Result<void> share_arenas(PlacedPlan& a, PlacedPlan& b) {
  const auto differs = [&](size_t role, const std::string& name) {
    return Error{ExitCode::kBug,
                 fmt::format("stage {}: plans `{}` and `{}` do not keep the same from step to step: {}", role, a.plan->name,
                             b.plan->name, name),
                 "report this with the case", ""};
  };
  if (a.arenas.size() != b.arenas.size()) return differs(std::min(a.arenas.size(), b.arenas.size()), "a stage more");
  for (size_t role = 0; role < a.arenas.size(); ++role) {
    struct Kept {
      const Buffer* buffer;
      int64_t offset;
    };
    const auto kept_by = [role](const PlacedPlan& placed) {
      std::vector<Kept> kept;
      const std::vector<Buffer>& buffers = placed.plan->roles[role].buffers;
      for (size_t i = 0; i < buffers.size(); ++i)
        if (outlives_steps(buffers[i])) kept.push_back({&buffers[i], placed.arenas[role].buffers[i]});
      return kept;
    };
    const std::vector<Kept> first = kept_by(a), second = kept_by(b);
    for (size_t i = 0; i < std::max(first.size(), second.size()); ++i) {
      if (i >= first.size() || i >= second.size()) return differs(role, (first.size() > i ? first : second)[i].buffer->name);
      const Buffer &x = *first[i].buffer, &y = *second[i].buffer;
      if (x.name != y.name || x.space != y.space || !(x.type == y.type) || first[i].offset != second[i].offset)
        return differs(role, x.name);
    }
    for (size_t space = 0; space < kSpaces; ++space)
      a.arenas[role].bytes[space] = b.arenas[role].bytes[space] =
          std::max(a.arenas[role].bytes[space], b.arenas[role].bytes[space]);
  }
  return {};
}

}  // namespace shardlab
