// What papers say of a pipeline's messages and parameters, from the configuration alone.
#include <fmt/format.h>

#include "plan/pipeline_case.h"
#include "plan/wire.h"
#include "strategies/lower.h"
#include "tests/namespaces.h"
#include "tests/schedules.h"
#include "tests/strategies/cases.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

/// Boundaries between parts that lie on different stages. Source: Narayanan et al. 2021, section 2.2.2 (v times as many); Qi et al. 2023,
/// section 6: a V turns around on the last stage, where nothing travels.
int64_t boundaries(Schedule schedule, int64_t p, int64_t v) {
  if (is_looped(schedule)) return p * v - 1;
  return is_folded(schedule) ? 2 * (p - 1) : p - 1;
}

TEST_CASE("messages of a step are an activation and its gradient for each boundary between stages and micro-batch") {
  for (const Schedule schedule : pipeline_schedules())
    for (const int p : {2, 3, 4})
      for (const int v : {2, 3})
        for (const int m : {1, p + 1}) {
          if (v > 2 && !is_looped(schedule)) continue;
          Case c = with_pipeline(tiny_case(), p, schedule, m);
          c.model.layers = 12;
          c.layout.vpp = is_looped(schedule) ? v : 1;
          c.train.micro_batch = 3;
          const bool mirrored = is_mirrored(schedule);
          if (mirrored && !check(c).ok()) continue;  // an even number of stages, a micro-batch for each direction
          const auto plan = lower(c);
          REQUIRE(plan.ok());
          int64_t bytes = 0, parameters = 0;
          for (const auto& [comm, sent] : total_wire_bytes(*plan))
            if (comm.starts_with("pp.fwd") || comm.starts_with("pp.bwd")) bytes += sent;
          INFO(name_of(schedule) << " p " << p << " v " << c.layout.vpp << " m " << m);
          REQUIRE(bytes == 2 * boundaries(schedule, p, v) * m * 3 * c.train.seq_len * c.model.hidden * 4);
          // Each parameter lies on one stage, and a mirrored one on two, which add up its gradients. A tied table lies on the two that use it.
          for (const Role& role : plan->roles)
            for (const Buffer& b : role.buffers)
              if (b.kind == BufferClass::kParameter && b.persistent && !b.view) parameters += b.type.shape.elements();
          REQUIRE(parameters == parameter_count(c.model) * (mirrored ? 2 : 1));
          const auto wire = total_wire_bytes(*plan);
          const auto sums = wire.find("pp.mirror");
          REQUIRE((sums == wire.end() ? 0 : sums->second) == (mirrored ? 2 * parameter_count(c.model) * 4 : 0));
        }
}

}  // namespace
}  // namespace shardlab::testing
