#include "tests/offload/cases.h"

#include <fmt/format.h>

#include "strategies/lower.h"
#include "tests/laws/replay.h"
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

std::string offload_line(const Case& c) {
  const Layout& l = c.layout;
  return fmt::format("{}{} {} dp{} zero{} tp{} pp{} {} ga{} bucket{} recompute={}{}{} {} offload {}", name_of(c.model.family),
                     c.model.tied_embeddings ? " tied" : "", name_of(c.train.precision), l.dp, l.zero, l.tp, l.pp, name_of(l.schedule),
                     c.train.grad_accumulation, l.bucket_bytes,
                     l.recompute_options.layers.empty() ? name_of(l.recompute) : l.recompute_options.layers,
                     l.overlap ? " overlap" : "", c.canonical ? " canonical" : "", name_of(c.train.optimizer),
                     offload_text(l.offload));
}

Plan plan_of(const Case& c) {
  auto plan = lower(c);
  INFO(offload_line(c) << (plan.ok() ? std::string() : "\n" + to_string(plan.error())));
  REQUIRE(plan.ok());
  return std::move(plan).value();
}

void require_replayed(const Case& c) {
  INFO(offload_line(c));
  REQUIRE(difference_from_replay(plan_of(c)) == "");
}

}  // namespace shardlab::testing
