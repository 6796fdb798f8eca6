// Pairs of choices of which docs/compatibility.md says that they go together are trained: every twelfth one, and all when thorough
// (tests/deal.h). Where both keep the reference's bits
// (tiers E0 and E1) the pair does; where one rounds, compresses or delays, the pair's losses stay near the reference's. Peak bytes
// by class and wire bytes of every pair's plan equal the closed forms.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string>

#include "cli/pairs.h"
#include "plan/base/hash.h"
#include "plan/optimizers.h"
#include "strategies/catalogue.h"
#include "tests/deal.h"
#include "tests/laws/equal.h"
#include "tests/namespaces.h"
#include "tests/numerics/against_reference.h"
#include "tests/test.h"

namespace shardlab::testing::of_pairs {
namespace {

/// A relative distance within which a loss is near: what fp8 makes of one of 2 heads by 16 in a model of width 64.
constexpr double kNear = 0.05;

bool keeps_bits(const Case& c) {
  if (has_blocks(row_of(c.train.optimizer)) && !updates_whole_parameters(c.layout))
    return false;  // tests/numerics/test_moment_blocks.cpp
  return c.train.precision == Precision::kFp32 &&
         std::ranges::none_of(catalogue(), [&](const Strategy& s) { return s.applies(c) && s.tier > Tier::kE1; });
}

Subject subject_of(const Case& c) {
  Subject s{.name = "pair", .model = c.model, .train = c.train, .sequences = c.sequences_per_step()};
  s.train.precision = Precision::kFp32;
  return s;
}

/// What the reference depends on.
std::string recipe(const Subject& s, const TokenOrder& order, bool packed) {
  const Train& t = s.train;
  return fmt::format("{} {} {} {} {} {} {} {} {} {} {} {} {} {} {} {}", name_of(t.optimizer), s.sequences, t.micro_batch,
                     t.grad_accumulation, t.dropout, t.clip_norm, s.model.tied_embeddings, static_cast<int>(order.kind),
                     order.parts, packed, s.model.experts.count, s.model.experts.bias_update_rate, s.model.experts.capacity_factor,
                     s.model.latent.kv_rank, s.model.window.tokens, s.model.window.global_every);
}

}  // namespace

TEST_CASE("legal pairs train as they promise, in the memory and with the bytes of their closed forms") {
  std::map<std::string, Expected<float>> references;
  const uint64_t shares = dealt(1, 30);
  uint64_t number = 0;
  int bits = 0, near = 0, planned = 0;
  double farthest = 0;
  std::string farthest_pair;
  for (LegalPair& pair : legal_pairs()) {
    if (number++ % shares != 0) continue;
    Case& c = pair.config;
    INFO(pair.first << " with " << pair.second);
    c.canonical = true;
    c.train.seq_len = 16;
    c.train.global_batch_tokens = c.sequences_per_step() * c.train.seq_len;
    if (c.backend != BackendKind::kCpu || c.layout.parameter_server.staleness >= 0)
      continue;  // a device, or an order of arrivals, of their own
    if (!check(c).ok()) c.canonical = false;
    REQUIRE(check(c).ok());
    const Plan plan = plan_of(c);
    CHECK(difference_from_replay(plan) == "");
    ++planned;
    const Subject subject = subject_of(c);
    const auto [found, fresh] = references.try_emplace(recipe(subject, plan.token_order, c.data.packed));
    if (fresh) found->second = expect<float>(subject, plan.token_order, c.data.packed);
    const Expected<float>& want = found->second;
    const auto trained = train_case(c, RandomText(c.model.vocab), kSteps);
    INFO((trained.ok() ? "" : to_string(trained.error())));
    CHECK(trained.ok());
    if (!trained.ok()) continue;
    if (keeps_bits(c) && c.canonical) {
      const std::string difference = differences(c, want, *trained);
      INFO(difference);
      CHECK(difference.empty());
      ++bits;
      continue;
    }
    ++near;
    REQUIRE(!trained->losses.empty());
    for (size_t step = 0; step < trained->losses.size(); ++step) {
      const double apart = std::abs(trained->losses[step] / want.losses[step] - 1);
      INFO("loss of step " << step << ": " << trained->losses[step] << ", reference " << want.losses[step]);
      CHECK(apart < kNear);
      if (apart > farthest) farthest = apart, farthest_pair = pair.first + " with " + pair.second;
    }
  }
  fmt::print(
      "{} pairs have the reference's bits, {} are near it (the farthest by {:.2g} of the loss: {}), {} plans equal the closed "
      "forms\n",
      bits, near, farthest, farthest_pair, planned);
  CHECK(static_cast<uint64_t>(bits) * shares > 600);
  CHECK(static_cast<uint64_t>(near) * shares > 450);
}

}  // namespace shardlab::testing::of_pairs
