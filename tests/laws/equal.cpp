#include "tests/laws/equal.h"

#include <map>
#include <string>

#include "plan/memory.h"
#include "plan/wire.h"
#include "simulator/closed_form.h"
#include "strategies/lower.h"
#include "tests/test.h"

namespace shardlab::testing {

Plan plan_of(const Case& c, bool verified) {
  INFO(c.name);
  auto plan = lower(c, {.after = {}, .verify = verified});
  INFO((plan.ok() ? std::string() : to_string(plan.error())));
  REQUIRE(plan.ok());
  return std::move(plan).value();
}

void require_equal(const Case& c, bool verified) {
  INFO(c.name);
  REQUIRE(check(c).ok());
  const Plan plan = plan_of(c, verified);
  const ClosedForm form = closed_form(c);
  for (size_t stage = 0; stage < plan.roles.size(); ++stage) {
    const StageForm& f = form.stages[stage];
    const auto peaks = memory_peak(plan, static_cast<int>(stage));
    const MemoryPeak& peak = peaks[static_cast<size_t>(Space::kDevice)];
    INFO("stage " << stage << ", the plan's peak at " << peak.moment << ", the formula's at " << name_of(f.moment));
    REQUIRE(f.at_peak.bytes == peak.at_peak.bytes);
    REQUIRE(f.peak == peak.peak_bytes);
    REQUIRE(f.persistent == peak.persistent_bytes);
    REQUIRE(f.host.at_peak.bytes == peaks[static_cast<size_t>(Space::kHost)].at_peak.bytes);
    REQUIRE(f.nvme.at_peak.bytes == peaks[static_cast<size_t>(Space::kNvme)].at_peak.bytes);
  }
  std::map<std::string, int64_t> wire;
  for (size_t i = 0; i < kChannels; ++i)
    if (form.wire[i] != 0) wire.emplace(name_of(static_cast<Channel>(i)), form.wire[i]);
  REQUIRE(wire == total_wire_bytes(plan));
}

}  // namespace shardlab::testing
