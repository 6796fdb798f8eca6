// Recompute layer by layer: bytes of every space to the replay, as measured and as planned; the same bits as without.
#include <string>
#include <vector>

#include "plan/memory.h"
#include "plan/treatment.h"
#include "simulator/interpreter/recompute_budget.h"
#include "strategies/lower.h"
#include "tests/namespaces.h"
#include "tests/offload/cases.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

using namespace testing;

/// Lists of seven layers, in which every treatment is beside every other kind.
constexpr const char* kLists[] = {
    "7*none",
    "7*full",
    "3*full 4*none",
    "4*none 3*full",
    "2*full@cpu 1*attn.core 1*full 1*none@cpu 1*attn.norm+mlp.act@cpu 1*none",
    "1*none 2*attn.core+mlp.act 1*mlp.norm 3*full",
    "1*attn.norm+attn.core+mlp.norm+mlp.act@cpu 1*full 2*none@cpu 1*attn.core 1*none 1*full@cpu",
};

constexpr Ranks kRanks[] = {
    {},
    {.accumulation = 3},
    {.dp = 2, .zero = 1},
    {.dp = 2, .zero = 2, .accumulation = 4},
    {.dp = 2, .zero = 3, .tp = 2, .accumulation = 2},
    {.tp = 2},
    {.pp = 2, .schedule = Schedule::k1F1B, .accumulation = 4},
    {.pp = 3, .schedule = Schedule::kAfab, .accumulation = 3},
    {.dp = 2, .zero = 1, .tp = 2, .pp = 2, .schedule = Schedule::k1F1B, .accumulation = 3},
};

Case listed(Case c, std::string layers) {
  c.layout.recompute = Recompute::kByLayer;
  c.layout.recompute_options.layers = std::move(layers);
  return c;
}

}  // namespace

TEST_CASE("by layer: the plan's bytes are its replay's in every space") {
  for (const Family family : {Family::kGpt, Family::kLlama})
    for (const Ranks& ranks : kRanks)
      for (const char* list : kLists)
        for (const bool overlap : {false, true})
          for (const Precision precision : {Precision::kFp32, Precision::kBf16}) {
            Case c = listed(small_case(family, 7), list);
            set(c, ranks);
            c.layout.overlap = overlap;
            c.train.precision = precision;
            c.train.dropout = overlap ? 0.1f : 0;
            require_replayed(c);
          }
}

TEST_CASE("by layer: what is measured is what was planned") {
  for (const Ranks& ranks : kRanks) {
    Case c = listed(small_case(Family::kLlama, 7), kLists[4]);
    set(c, ranks);
    require_measured_as_planned(c);
  }
}

TEST_CASE("by layer: the same bits as without") {
  size_t number = 0;
  for (const Ranks& ranks : kRanks)
    for (const Family family : {Family::kGpt, Family::kLlama}) {
      Case c = small_case(family, 7);
      set(c, ranks);
      c.train.precision = number % 3 == 0 ? Precision::kBf16 : Precision::kFp32;
      c.train.dropout = 0.1f;
      require_same_bits(c, listed(c, kLists[2 + number++ % 5]));
    }
}

TEST_CASE("a list of layers alike is the technique by its older name") {
  const auto same = [](const Case& listed_case, const Case& named) {
    const Plan a = plan_of(listed_case), b = plan_of(named);
    for (size_t s = 0; s < kSpaces; ++s) {
      CHECK(memory_peak(a, 0)[s].peak_bytes == memory_peak(b, 0)[s].peak_bytes);
      CHECK(memory_peak(a, 0)[s].at_peak.bytes == memory_peak(b, 0)[s].at_peak.bytes);
    }
    CHECK(a.roles[0].program.size() == b.roles[0].program.size());
  };
  const Case c = small_case(Family::kGpt, 5);
  Case named = c;
  same(listed(c, "5*none"), named);
  named.layout.offload.activations = OffloadTo::kCpu;
  same(listed(c, "5*none@cpu"), named);
  named.layout.recompute = Recompute::kFull;
  same(listed(c, "5*full@cpu"), named);
  named.layout.offload = {};
  same(listed(c, "5*full"), named);
  named.layout.recompute_options.every = 2;
  same(listed(c, "1*full 1*none 1*full 1*none 1*full"), named);
  named.layout.recompute_options = {.modules = "attn.core mlp.act"};
  named.layout.recompute = Recompute::kSelective;
  same(listed(c, "5*attn.core+mlp.act"), named);
}

TEST_CASE("what was not decided is not lowered") {
  Case c = small_case(Family::kGpt, 3);
  c.layout.recompute_options.budget_bytes = 1 << 20;
  const auto plan = lower(c);
  REQUIRE_FALSE(plan.ok());
  CHECK(plan.error().message == "recompute within 1048576 bytes has not been decided: a plan knows no seconds");
}

}  // namespace shardlab::testing
