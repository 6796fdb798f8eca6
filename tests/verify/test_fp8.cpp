// Factors of 8 bits: what `verify` finds in plans that scale them otherwise.
#include <fmt/format.h>

#include "plan/text.h"
#include "strategies/lower.h"
#include "tests/namespaces.h"
#include "tests/test.h"
#include "tests/verify/good_plans.h"

namespace shardlab::testing {
namespace {

std::string plan_text(Fp8Scaling scaling) {
  Case c;
  c.model = {.name = "tiny",
             .family = Family::kLlama,
             .layers = 2,
             .hidden = 16,
             .heads = 2,
             .kv_heads = 2,
             .head_dim = 8,
             .ffn = 32,
             .vocab = 32};
  c.layout.tp = 2;
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

TEST_CASE("fp8: the largest size of a slice is not that of the whole") {
  // Megatron-LM issue 442, Transformer Engine issue 335: scales that the tp group did not agree on.
  CHECK(contains(broken(Fp8Scaling::kCurrent, "(%attn.wqkv) -> (%attn.qkv.w.amax.part)", "(%attn.wqkv) -> (%attn.qkv.w.amax)"),
                 "the largest of one part is declared that of the whole"));
  CHECK(
      contains(broken(Fp8Scaling::kCurrent, "all_reduce attn.qkv.w.amax.all (%attn.qkv.w.amax.part) -> (%attn.qkv.w.amax) comm=tp reduce=max",
                      "all_reduce attn.qkv.w.amax.all (%attn.qkv.w.amax.part) -> (%attn.qkv.w.amax) comm=tp"),
               "a partial maximum"));
  CHECK(contains(broken(Fp8Scaling::kCurrent, "(%attn.qkv.w.amax) -> (%attn.qkv.w.scale)", "(%attn.qkv.w.amax.part) -> (%attn.qkv.w.scale)"),
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
  CHECK(contains(broken(Fp8Scaling::kCurrent, "linear.F attn.qkv (%attn.qkv.x.q, %attn.qkv.w.q, %attn.qkv.x.scale, %attn.qkv.w.scale)",
                        "linear.F attn.qkv (%attn.qkv.x.q, %attn.qkv.w.q)"),
                 "form: "));
  CHECK(contains(broken(Fp8Scaling::kCurrent, "linear.F attn.qkv (%attn.qkv.x.q, %attn.qkv.w.q, %attn.qkv.x.scale, %attn.qkv.w.scale)",
                        "linear.F attn.qkv (%attn.qkv.x.q, %attn.qkv.w.q, %lse, %attn.qkv.w.scale)"),
                 "are neither one for %attn.qkv.x.q"));
}

}  // namespace shardlab::testing
