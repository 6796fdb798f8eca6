#include "tests/laws/equal.h"

#include <fmt/ranges.h>

#include <map>
#include <string>

#include "plan/memory.h"
#include "plan/wire.h"
#include "simulator/closed_form.h"
#include "strategies/lower.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {

Plan plan_of(const Case& c, bool verified) {
  INFO(c.name);
  auto plan = lower(c, {.after = {}, .verify = verified});
  INFO((plan.ok() ? std::string() : to_string(plan.error())));
  REQUIRE(plan.ok());
  return std::move(plan).value();
}

std::string difference_from_closed_form(const Plan& plan, const Case& c) {
  // The formulas are of 1F1B and AFAB of even stages.
  if (c.layout.schedule > Schedule::k1F1B || !c.layout.stage_layers.empty()) return "";
  const ClosedForm form = closed_form(c);
  for (size_t stage = 0; stage < plan.roles.size(); ++stage) {
    const StageForm& f = form.stages[stage];
    const auto peaks = memory_peak(plan, static_cast<int>(stage));
    const MemoryPeak& peak = peaks[static_cast<size_t>(Space::kDevice)];
    const std::string where =
        fmt::format("stage {}, the plan's peak at {}, the formula's at {}", stage, peak.moment, name_of(f.moment));
    const auto classes = [&](const char* what, const MemoryByClass& formula, const MemoryByClass& planned) {
      return formula.bytes == planned.bytes ? std::string()
                                            : fmt::format("{}: {} bytes by class are {} by the formula, {} in the plan", where,
                                                          what, fmt::join(formula.bytes, " "), fmt::join(planned.bytes, " "));
    };
    for (const std::string& difference : {classes("device", f.at_peak, peak.at_peak),
                                          classes("host", f.host.at_peak, peaks[static_cast<size_t>(Space::kHost)].at_peak),
                                          classes("NVMe", f.nvme.at_peak, peaks[static_cast<size_t>(Space::kNvme)].at_peak)})
      if (!difference.empty()) return difference;
    if (f.peak != peak.peak_bytes) return fmt::format("{}: {} B by the formula, {} B in the plan", where, f.peak, peak.peak_bytes);
    if (f.persistent != peak.persistent_bytes)
      return fmt::format("{}: {} B persist by the formula, {} B in the plan", where, f.persistent, peak.persistent_bytes);
  }
  std::map<std::string, int64_t> wire;
  for (size_t i = 0; i < kChannels; ++i)
    if (form.wire[i] != 0) wire.emplace(name_of(static_cast<Channel>(i)), form.wire[i]);
  if (wire == total_wire_bytes(plan)) return "";
  const auto listed = [](const std::map<std::string, int64_t>& channels) {
    std::string text;
    for (const auto& [name, bytes] : channels) text += fmt::format(" {} {} B", name, bytes);
    return text;
  };
  return fmt::format("wire:{} by the formula,{} in the plan", listed(wire), listed(total_wire_bytes(plan)));
}

void require_equal(const Case& c, bool verified) {
  INFO(c.name);
  REQUIRE(check(c).ok());
  REQUIRE(difference_from_closed_form(plan_of(c, verified), c) == "");
}

}  // namespace shardlab::testing
