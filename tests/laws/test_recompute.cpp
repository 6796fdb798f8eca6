// Selective recompute: folds of the plan replayed for every set of sub-layers, and what the literature says of bytes.
#include <map>
#include <string>

#include "plan/collective_steps.h"
#include "plan/memory.h"
#include "plan/wire.h"
#include "strategies/lower.h"
#include "tests/laws/replay.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

constexpr std::string_view kSubLayers[] = {"attn.norm", "attn.core", "mlp.norm", "mlp.act"};

/// Set number `set` of the sixteen; the empty one is the default, the attention core.
std::string modules(unsigned set) {
  std::string words;
  for (unsigned i = 0; i < 4; ++i)
    if ((set >> i) & 1) words += (words.empty() ? "" : " ") + std::string(kSubLayers[i]);
  return words;
}

Case tiny(Family family) {
  Case c;
  c.model = {.name = "tiny",
             .family = family,
             .layers = 5,
             .hidden = 48,
             .heads = 4,
             .kv_heads = family == Family::kLlama ? 2 : 4,
             .head_dim = 20,
             .ffn = 72,
             .vocab = 96,
             .max_positions = family == Family::kGpt ? 24 : 0};
  c.train.seq_len = 24;
  return c;
}

Plan plan_of(const Case& c) {
  auto plan = lower(c);
  INFO((plan.ok() ? std::string() : to_string(plan.error())));
  REQUIRE(plan.ok());
  return std::move(plan).value();
}

void require_replayed(const Case& c) { REQUIRE(difference_from_replay(plan_of(c)) == ""); }

/// Activation bytes that one more layer keeps, per element of b s, for a GPT with a d = h and f = 4 h.
double kept_per_token(Recompute recompute, const std::string& sub_layers = "") {
  const auto at = [&](int64_t layers) {
    Case c;
    c.model = {.name = "gpt",
               .family = Family::kGpt,
               .layers = layers,
               .hidden = 64,
               .heads = 16,
               .kv_heads = 16,
               .head_dim = 4,
               .ffn = 256,
               .vocab = 128,
               .max_positions = 64};
    c.train.seq_len = 64;
    c.train.micro_batch = 2;
    c.layout.recompute = recompute;
    c.layout.recompute_options.modules = sub_layers;
    const MemoryPeak peak = memory_peak(plan_of(c), 0)[static_cast<size_t>(Space::kDevice)];
    return peak.at_peak.bytes[static_cast<size_t>(BufferClass::kActivation)];
  };
  return static_cast<double>(at(6) - at(5)) / (4 * 2 * 64);
}

}  // namespace

TEST_CASE("selective recompute: the plan's peak and wire bytes are those of its replay for every set of sub-layers") {
  struct Shape {
    int dp = 1, zero = 0, tp = 1, pp = 1;
    Schedule schedule = Schedule::kNone;
    int64_t accumulation = 1;
    float dropout = 0;
  };
  const Shape shapes[] = {
      {},
      {.dropout = 0.1f},
      {.dp = 2, .accumulation = 3},
      {.dp = 2, .zero = 1, .tp = 2, .pp = 2, .schedule = Schedule::k1F1B, .accumulation = 4},
      {.dp = 2, .zero = 2, .accumulation = 2, .dropout = 0.1f},
      {.dp = 4, .zero = 3, .tp = 2, .accumulation = 2},
      {.tp = 4, .pp = 3, .schedule = Schedule::kAfab, .accumulation = 3},
  };
  for (const Family family : {Family::kGpt, Family::kLlama})
    for (const Shape& s : shapes)
      for (unsigned set = 0; set < 16; ++set) {
        Case c = tiny(family);
        if (s.tp == 4 && family == Family::kLlama) c.model.kv_heads = 4;
        c.layout.dp = s.dp;
        c.layout.zero = s.zero;
        c.layout.tp = s.tp;
        c.layout.pp = s.pp;
        c.layout.schedule = s.schedule;
        c.train.grad_accumulation = s.accumulation;
        c.train.dropout = s.dropout;
        c.layout.recompute = Recompute::kSelective;
        c.layout.recompute_options.modules = modules(set);
        CAPTURE(name_of(family), s.dp, s.zero, s.tp, s.pp, s.accumulation, s.dropout, modules(set));
        require_replayed(c);
      }
}

TEST_CASE("the residual stream wider than attention, and attention wider than it: the highest moment is found either way") {
  for (const int64_t head_dim : {4, 100})
    for (unsigned set = 0; set < 16; ++set) {
      Case c = tiny(Family::kLlama);
      c.model.head_dim = head_dim;
      c.model.ffn = 40;
      c.layout.recompute = Recompute::kSelective;
      c.layout.recompute_options.modules = modules(set);
      CAPTURE(head_dim, modules(set));
      require_replayed(c);
    }
}

TEST_CASE("what sub-layers keep, and no longer do") {
  // Korthikanti et al. (2022), section 4.1, in elements a token: a layer keeps 16 h + a + 4 of which the attention core's output
  // and log sums are h + a, the activation's output 4 h, each norm's h + 2.
  const double h = 64, a = 16, all = 16 * h + a + 4;
  CHECK(kept_per_token(Recompute::kNone) == all);
  CHECK(kept_per_token(Recompute::kSelective) == all - (h + a));
  CHECK(kept_per_token(Recompute::kSelective, "attn.core") == all - (h + a));
  CHECK(kept_per_token(Recompute::kSelective, "mlp.act") == all - 4 * h);
  CHECK(kept_per_token(Recompute::kSelective, "attn.norm") == all - (h + 2));
  CHECK(kept_per_token(Recompute::kSelective, "attn.norm attn.core mlp.norm mlp.act") == all - (h + a) - 4 * h - 2 * (h + 2));
  CHECK(kept_per_token(Recompute::kFull) == h);
}

TEST_CASE("sub-layers that cannot be made again by themselves are refused") {
  Case c = tiny(Family::kGpt);
  c.layout.recompute = Recompute::kSelective;
  c.layout.recompute_options.modules = "attn.core mlp.up";
  const auto refused = check(c);
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.error().message == "recompute of `mlp.up`, which is no sub-layer that can be made again by itself");
  CHECK(refused.error().hint.find("attn.norm, attn.core, mlp.norm and mlp.act") != std::string::npos);
  c.layout.recompute = Recompute::kFull;
  CHECK_FALSE(check(c).ok());
}

}  // namespace shardlab::testing
