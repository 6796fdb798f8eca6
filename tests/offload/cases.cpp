#include "tests/offload/cases.h"

#include <fmt/format.h>

#include <map>

#include "plan/memory.h"
#include "plan/wire.h"
#include "simulator/closed_form.h"
#include "strategies/lower.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {

Case small_case(Family family, int64_t layers) {
  Case c;
  c.model = {.name = "small",
             .family = family,
             .layers = layers,
             .hidden = 36,
             .heads = 4,
             .kv_heads = family == Family::kLlama ? 2 : 4,
             .head_dim = 10,
             .ffn = 52,
             .vocab = 68,
             .max_positions = family == Family::kGpt ? 13 : 0};
  c.model.init_deviation = 0.1f;
  c.train.seq_len = 12;
  c.train.micro_batch = 2;
  c.train.learning_rate.peak = 0.01f;
  c.train.weight_decay = 0.1f;
  return c;
}

void set(Case& c, const Ranks& r) {
  c.layout.dp = r.dp;
  c.layout.zero = r.zero;
  c.layout.tp = r.tp;
  c.layout.pp = r.pp;
  c.layout.schedule = r.schedule;
  c.train.grad_accumulation = r.accumulation;
}

std::string line_of(const Case& c) {
  const Layout& l = c.layout;
  return fmt::format("{}{} {} dp{} zero{} tp{} pp{} {} ga{} bucket{} recompute={}{}{} {} offload {}", name_of(c.model.family),
                     c.model.tied_embeddings ? " tied" : "", c.train.precision, l.dp, l.zero, l.tp, l.pp, name_of(l.schedule),
                     c.train.grad_accumulation, l.bucket_bytes,
                     l.recompute_options.layers.empty() ? name_of(l.recompute) : l.recompute_options.layers,
                     l.overlap ? " overlap" : "", c.canonical ? " canonical" : "", name_of(c.train.optimizer),
                     offload_text(l.offload));
}

Plan plan_of(const Case& c) {
  auto plan = lower(c);
  INFO(line_of(c) << (plan.ok() ? std::string() : "\n" + to_string(plan.error())));
  REQUIRE(plan.ok());
  return std::move(plan).value();
}

void require_closed_form(const Case& c) {
  const Plan plan = plan_of(c);
  const ClosedForm form = closed_form(c);
  INFO(line_of(c));
  for (size_t stage = 0; stage < plan.roles.size(); ++stage) {
    const auto peaks = memory_peak(plan, static_cast<int>(stage));
    const StageForm& f = form.stages[stage];
    const MemoryPeak& device = peaks[static_cast<size_t>(Space::kDevice)];
    INFO("stage " << stage << ", the plan's peak at " << device.moment << ", the formula's at " << name_of(f.moment));
    REQUIRE(f.at_peak.bytes == device.at_peak.bytes);
    REQUIRE(f.peak == device.peak_bytes);
    REQUIRE(f.persistent == device.persistent_bytes);
    for (const auto& [space, outside] : {std::pair{Space::kHost, &f.host}, {Space::kNvme, &f.nvme}}) {
      INFO(name_of(space) << ", the plan's peak at " << peaks[static_cast<size_t>(space)].moment);
      REQUIRE(outside->at_peak.bytes == peaks[static_cast<size_t>(space)].at_peak.bytes);
      REQUIRE(outside->peak == peaks[static_cast<size_t>(space)].peak_bytes);
    }
  }
  std::map<std::string, int64_t> wire;
  for (size_t i = 0; i < kChannels; ++i)
    if (form.wire[i] != 0) wire.emplace(name_of(static_cast<Channel>(i)), form.wire[i]);
  REQUIRE(wire == total_wire_bytes(plan));
}

}  // namespace shardlab::testing
