#include "tests/numerics/sized_cases.h"

#include <fmt/format.h>

#include <map>

#include "plan/base/hash.h"
#include "strategies/lower.h"
#include "tests/deal.h"
#include "tests/test.h"

namespace shardlab::testing {

Case case_of(const Subject& subject, const Sizes& sizes, bool canonical) {
  Case c;
  c.canonical = canonical;
  c.model = subject.model;
  c.train = subject.train;
  c.layout.dp = sizes.dp, c.layout.ep = sizes.ep, c.layout.pp = sizes.pp, c.layout.zero = sizes.zero;
  c.layout.overlap = sizes.accumulation % 2 == 0;
  if (sizes.pp > 1) c.layout.schedule = sizes.schedule;
  c.layout.cp = sizes.cp;
  if (sizes.cp > 1) c.layout.cp_kind = sizes.kind;
  if (c.layout.cp_kind == ContextKind::kUsp) c.layout.cp_ulysses = 2;
  c.layout.tp = sizes.tp, c.layout.sequence_parallel = sizes.sequence_parallel, c.layout.expert_tp = sizes.expert_tp;
  c.train.grad_accumulation = sizes.accumulation;
  c.train.micro_batch = subject.sequences / (sizes.accumulation * sizes.dp);
  c.train.grad_norm = true;
  const std::string folded = sizes.expert_tp > 1 ? fmt::format(" expert-tp{}", sizes.expert_tp) : " whole-experts";
  c.name = fmt::format("{} dp{} ep{} pp{} zero{} ga{} cp{} {} tp{}{}", subject.name, sizes.dp, sizes.ep, sizes.pp, sizes.zero,
                       sizes.accumulation, sizes.cp, name_of(c.layout.cp_kind), sizes.tp,
                       c.layout.folds_experts()  ? folded
                       : sizes.sequence_parallel ? std::string(" sequence-parallel")
                                                 : "");
  return c;
}

Result<Trained> train(const Case& config) { return train_case(config, RandomText(config.model.vocab), kSteps); }

void train_all(const Subject& subject, const std::vector<Case>& cases) {
  std::map<std::string, Expected<float>> known;
  uint64_t number = hash_text(subject.name);
  for (const Case& config : cases) {
    if (mix(number++) % dealt(1, cases.size() > 8 ? 6 : cases.size() > 4 ? 3 : 1) != 0) continue;
    INFO(config.name);
    const auto plan = lower(config);
    INFO((plan ? "" : to_string(plan.error())));
    REQUIRE(plan.ok());
    const TokenOrder order = plan->token_order;
    const auto [expected, fresh] = known.try_emplace(fmt::format("{} {}", static_cast<int>(order.kind), order.parts));
    if (fresh) expected->second = expect<float>(subject, order);
    const auto trained = train(config);
    const std::string difference = trained ? differences(config, expected->second, *trained) : to_string(trained.error());
    INFO(difference);
    CHECK(difference.empty());
  }
}

}  // namespace shardlab::testing
