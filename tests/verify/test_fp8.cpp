// Factors of 8 bits: what `verify` finds in plans that scale them otherwise.
#include <fmt/format.h>

#include <algorithm>

#include "plan/text.h"
#include "strategies/lower.h"
#include "tests/namespaces.h"
#include "tests/test.h"
#include "tests/verify/good_plans.h"

namespace shardlab::testing {
namespace {

std::string plan_text(Fp8Scaling scaling, int tp = 2) {
  Case c;
  c.model = {.name = "tiny",
             .family = Family::kLlama,
             .layers = 2,
             .hidden = 16,
             .heads = std::max(2, tp),
             .kv_heads = 2,
             .head_dim = 8,
             .ffn = 32,
             .vocab = 32};
  c.layout.tp = tp;
  c.train.seq_len = 8;
  c.train.precision = Precision::kFp8;
  c.train.fp8_scaling = scaling;
  auto plan = lower(c);
  INFO((plan.ok() ? "" : to_string(plan.error())));
  REQUIRE(plan.ok());
  return print(*plan);
}

std::string first_finding(const std::string& text) {
  const auto findings = find_faults(parse_or_fail(text));
  return findings.empty() ? "" : fmt::format("{}: {}", name_of(findings[0].rule), findings[0].message);
}

std::string broken(Fp8Scaling scaling, std::string_view from, std::string_view to) {
  return first_finding(replaced(plan_text(scaling), from, to));
}

bool contains(const std::string& text, std::string_view part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_CASE("fp8: the plans to break are good") {
  CHECK(first_finding(plan_text(Fp8Scaling::kCurrent)) == "");
  CHECK(first_finding(plan_text(Fp8Scaling::kDelayed)) == "");
}

TEST_CASE("fp8: rows of q, k and v that ranks gather, since tp is above the kv heads, stay gathered in 16 bits") {
  for (const Fp8Scaling scaling : {Fp8Scaling::kCurrent, Fp8Scaling::kDelayed}) {
    const std::string text = plan_text(scaling, 4);
    CHECK(contains(text, "all_gather attn.rows"));
    CHECK(first_finding(text) == "");
  }
}

TEST_CASE("fp8: the largest size of a slice is not that of the whole") {
  // Megatron-LM issue 442, Transformer Engine issue 335: scales that the tp group did not agree on.
  CHECK(contains(broken(Fp8Scaling::kCurrent, "(%attn.wqkv) -> (%attn.qkv.w.amax.part)", "(%attn.wqkv) -> (%attn.qkv.w.amax)"),
                 "the largest of one part is declared that of the whole"));
  CHECK(contains(broken(Fp8Scaling::kCurrent,
                        "all_reduce attn.qkv.w.amax.all (%attn.qkv.w.amax.part) -> (%attn.qkv.w.amax) comm=tp reduce=max",
                        "all_reduce attn.qkv.w.amax.all (%attn.qkv.w.amax.part) -> (%attn.qkv.w.amax) comm=tp"),
                 "a partial maximum"));
  CHECK(contains(
      broken(Fp8Scaling::kCurrent, "(%attn.qkv.w.amax) -> (%attn.qkv.w.scale)", "(%attn.qkv.w.amax.part) -> (%attn.qkv.w.scale)"),
      "types: "));
}

TEST_CASE("fp8: a factor goes with the scales that it was divided by") {
  for (const Fp8Scaling scaling : {Fp8Scaling::kCurrent, Fp8Scaling::kDelayed}) {
    INFO(name_of(scaling));
    CHECK(contains(broken(scaling, "linear.F attn.out (%attn.out.x.q, %attn.out.w.q, %attn.out.x.scale",
                          "linear.F attn.out (%attn.out.x.q, %attn.out.w.q, %attn.qkv.x.scale"),
                   "multiplies %attn.out.x.q by %attn.qkv.x.scale, and it was divided by other scales"));
    CHECK(contains(broken(scaling, "linear.W mlp.up (%mlp.up.x.q, %mlp.up.dy.q, %mlp.up.x.scale, %mlp.up.dy.scale)",
                          "linear.W mlp.up (%mlp.up.x.q, %mlp.up.dy.q, %mlp.up.x.scale, %mlp.up.x.scale)"),
                   "multiplies %mlp.up.dy.q by %mlp.up.x.scale, and it was divided by other scales"));
    CHECK(broken(scaling, "kernel attn.out.w.quantise.again (%attn.wo, %attn.out.w.scale)",
                 "kernel attn.out.w.quantise.again (%attn.wo, %attn.qkv.w.scale)")
              .starts_with("values: "));
  }
}

TEST_CASE("fp8: scales of another shape, and factors without, are refused") {
  CHECK(contains(
      broken(Fp8Scaling::kCurrent, "linear.F attn.qkv (%attn.qkv.x.q, %attn.qkv.w.q, %attn.qkv.x.scale, %attn.qkv.w.scale)",
             "linear.F attn.qkv (%attn.qkv.x.q, %attn.qkv.w.q)"),
      "form: "));
  CHECK(contains(
      broken(Fp8Scaling::kCurrent, "linear.F attn.qkv (%attn.qkv.x.q, %attn.qkv.w.q, %attn.qkv.x.scale, %attn.qkv.w.scale)",
             "linear.F attn.qkv (%attn.qkv.x.q, %attn.qkv.w.q, %lse, %attn.qkv.w.scale)"),
      "are neither one for %attn.qkv.x.q"));
}

namespace {

/// A mixture of experts in blocks, on two ranks that share the experts.
std::string experts_text(float bound = 0) {
  Case c;
  c.model = {.name = "mixture",
             .family = Family::kLlama,
             .layers = 2,
             .hidden = 16,
             .heads = 2,
             .kv_heads = 2,
             .head_dim = 8,
             .ffn = 32,
             .vocab = 32,
             .experts = {.count = 4, .top_k = 2, .ffn = 8}};
  c.layout.dp = 2;
  c.layout.ep = 2;
  c.layout.expert_bound = bound;
  c.train.seq_len = 8;
  c.train.micro_batch = 2;
  c.train.precision = Precision::kFp8;
  c.train.fp8_scaling = Fp8Scaling::kBlock;
  auto plan = lower(c);
  INFO((plan.ok() ? "" : to_string(plan.error())));
  REQUIRE(plan.ok());
  return print(*plan);
}

/// What is found where `from` is `to`, which must be said of it.
void refused(const std::string& text, std::string_view from, std::string_view to, std::string_view says) {
  const std::string found = first_finding(replaced(text, from, to));
  INFO(from << " -> " << to << "\n" << found);
  CHECK(found != "");
  CHECK(contains(found, says));
}

}  // namespace

TEST_CASE("fp8 experts: rows that are rounded without counts, by others' counts, or go by other scales are refused") {
  const std::string good = experts_text();
  REQUIRE(first_finding(good) == "");
  // moe-nocounts, moe-badcount, moe-wrongscale of products in 8 bits.
  refused(good,
          "kernel moe.down.x.quantise (%rows.a, %rows.counts.there) -> (%moe.down.x.q, %moe.down.x.scales) name=fp8_quantise_1x128 "
          "counted rows=32",
          "kernel moe.down.x.quantise (%rows.a) -> (%moe.down.x.q, %moe.down.x.scales) name=fp8_quantise_1x128",
          "goes by no counts of rows");
  refused(good, "kernel moe.up.x.home.quantise (%rows.in, %rows.counts)", "kernel moe.up.x.home.quantise (%rows.in, %moe.choice)",
          "rows are counted where they are");
  refused(good, "kernel moe.down.x.quantise (%rows.a, %rows.counts.there)", "kernel moe.down.x.quantise (%rows.a, %rows.counts)",
          "groups of rows");
  refused(good, "kernel moe.up.x.home.quantise (%rows.in, %rows.counts)", "kernel moe.up.x.home.quantise (%rows.out, %rows.counts)",
          "");
  refused(good, "(%moe.up.x.q, %moe.up.w.q, %rows.counts.there, %moe.up.x.scales, %moe.up.w.scales) -> (%rows.u)",
          "(%moe.up.x.q, %moe.up.w.q, %rows.counts.there, %moe.up.w.scales, %moe.up.x.scales) -> (%rows.u)",
          "are not one each 128");
  refused(good, "(%moe.up.x.q, %moe.up.w.q, %rows.counts.there, %moe.up.x.scales, %moe.up.w.scales) -> (%rows.u)",
          "(%moe.up.x.q, %moe.up.w.q, %rows.counts.there) -> (%rows.u)", "form: ");
  refused(good, "grouped_linear.W moe.up (%moe.up.x.q, %moe.up.dy.q, %rows.counts.there, %moe.up.x.scales, %moe.up.dy.scales)",
          "grouped_linear.W moe.up (%moe.up.x.q, %moe.up.dy.q, %rows.counts.there, %moe.up.x.scales, %moe.up.x.scales)",
          "it was divided by other scales");
  refused(good, "all_to_all moe.go.scales (%moe.up.x.home.scales, %rows.counts, %rows.counts.there)",
          "all_to_all moe.go.scales (%moe.up.x.home.scales, %rows.counts.there, %rows.counts)", "");
  refused(good, "kernel moe.up.w.quantise (%moe.wup) -> (%moe.up.w.q, %moe.up.w.scales) name=fp8_quantise_128x128",
          "kernel moe.up.w.quantise (%moe.wup) -> (%moe.up.w.q, %moe.up.w.scales) name=fp8_quantise_128x128 counted",
          "no kernel that goes by counts of rows");
  refused(good, "(%moe.up.x.home.q, %moe.up.x.home.scales) name=fp8_quantise_1x128 counted rows=32",
          "(%moe.up.x.home.q, %moe.up.x.home.scales) name=fp8_quantise_1x128 counted rows=99999", "rows=99999");
  refused(good, "(%attn.qkv.x.q, %attn.qkv.x.scales) name=fp8_quantise_1x128",
          "(%attn.qkv.x.q, %attn.qkv.x.scales) name=fp8_quantise_1x128 rows=4", "expected of rows that are counted");
}

TEST_CASE("fp8 experts: rows that have come are rounded by the counts that end where their room does") {
  const std::string good = experts_text(1.5f);
  REQUIRE(first_finding(good) == "");
  refused(good, "kernel moe.down.x.quantise (%rows.a, %rows.counts.fit)",
          "kernel moe.down.x.quantise (%rows.a, %rows.counts.there)", "Counts that fit_rows makes end there");
  refused(good, "kernel moe.fit (%moe.up.x.q, ", "kernel moe.fit (%moe.up.w.q, ", "");
}

}  // namespace shardlab::testing
