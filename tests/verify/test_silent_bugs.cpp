// Silent faults of trainers, each built into a good plan: `verify` refuses it, and a finding names the tensor, the axis, and the
// sum that is missing or is one too many. Where a fault is of a part that no plan here has (an attention sink, a padding mask, a further
// token), it is built into the part that has the same placement.
//
// Sources: Megatron-LM #7452, "Silent numerical-correctness bugs in Megatron Core parallelism composition" (2026), by number of its
// findings; and the reports that a row names.
#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <string_view>

#include "plan/text.h"
#include "tests/golden_plans.h"
#include "tests/namespaces.h"
#include "tests/test.h"
#include "tests/verify/good_plans.h"

namespace shardlab::testing {
namespace {

struct SilentBug {
  std::string_view told;     ///< what went wrong, and where it is told
  std::string_view plan;     ///< a golden one
  std::string_view segment;  ///< in which the text below stands; empty: in the program of a role
  std::string_view from, to;
  std::string_view says;  ///< how a finding begins, behind its rule
};

std::string golden(std::string_view name) {
  const std::string text = golden_plan(std::string(name));
  REQUIRE_FALSE(text.empty());
  return text;
}

/// The text with `from` replaced in one segment, or in the programs: it stands there once.
std::string broken(const SilentBug& bug) {
  const std::string text = golden(bug.plan);
  if (bug.segment.empty()) return replaced(text, bug.from, bug.to);
  const size_t begin = text.find(fmt::format("\nsegment {}\n", bug.segment)) + 1;
  REQUIRE(begin != 0);
  const size_t end = std::min({text.find("\nsegment ", begin), text.find("\nrole ", begin), text.size()});
  return text.substr(0, begin) + replaced(text.substr(begin, end - begin), bug.from, bug.to) + text.substr(end);
}

constexpr SilentBug kBugs[] = {
    {"1, #737: the vocabulary-parallel loss takes a rank's own part of the vocabulary for all of it (label smoothing)",
     "experts-sliced", "head.F", "(%logits, %targets, %loss.max, %loss.sums) -> (%loss, %logits)",
     "(%logits, %targets, %loss.max, %loss.sums.part) -> (%loss, %logits)",
     "along tp: %loss.sums.part is an unreduced sum, and the op is not linear in it: reduce it first"},
    {"2: logits that are gathered enter the vocabulary-parallel loss, whose sum is then log(tp) too large", "experts-sliced",
     "head.F", "all_reduce loss.sums.all (%loss.sums.part) -> (%loss.sums)",
     "all_reduce loss.sums.all (%loss.sums) -> (%loss.sums)",
     "along tp: %loss.sums is already whole, and the sum would be 2 times too large"},
    {"3, 9, #673: a loss is divided by the tokens of one rank of cp", "context-parallel-all-gather", "head.F", "tokens=64",
     "tokens=32", "%logits is declared at scale 1, but a division by 32 of the step's 64 targets leaves scale 1/2"},
    {"4: recompute gathers saved activations over another group than the one that cut them", "experts-sliced", "layer.B",
     "all_gather attn.qkv.gather.again (%attn.norm.y) -> (%attn.norm.y.all) comm=tp.again",
     "all_gather attn.qkv.gather.again (%attn.norm.y) -> (%attn.norm.y.all) comm=ep",
     "along ep: %attn.norm.y.all is declared shard(0), but all_gather of shard(0) data makes it replicate"},
    {"5, 6, 7: tokens are scattered over another group than the one that gathers them", "experts-sliced", "embed.F",
     "reduce_scatter g (%x.part) -> (%x) comm=tp", "reduce_scatter g (%x.part) -> (%x) comm=ep",
     "along ep: %x.part is shard(0), and summing unlike parts has no meaning"},
    {"8, #5916: the norm for clipping counts a part of what is sharded", "expert-parallel", "grad_norm2.sum.dp", "comm=metrics.dp",
     "comm=experts.grads", "along ep: %b is declared replicate, but all_reduce of partial data makes it partial"},
    {"10: the loss for even use counts the tokens that one rank of cp has", "experts-sliced-canonical", "layer.B",
     "(%d.moe.weights, %moe.logits, %moe.choice, %moe.load) -> (%d.moe.logits)",
     "(%d.moe.weights, %moe.logits, %moe.choice, %moe.load.part) -> (%d.moe.logits)",
     "along cp: %moe.load.part is an unreduced sum, and the op is not linear in it: reduce it first"},
    {"11: a norm of heads is replicated over tp, and its gradient stays the sum over a rank's heads", "experts-sliced", "layer.B",
     "(%d.attn.q_norm.gamma.tokens, %d.attn.k_norm.gamma.tokens) -> (%d.attn.q_norm.gamma, %d.attn.k_norm.gamma)",
     "(%d.attn.q_norm.gamma.tokens.part, %d.attn.k_norm.gamma.tokens) -> (%d.attn.q_norm.gamma, %d.attn.k_norm.gamma)",
     "along tp: %d.attn.q_norm.gamma is declared replicate, but its reads make it partial; it must be reduced"},
    {"11, the all-reduce left out", "experts-sliced", "layer.B",
     "  all_reduce attn.q_norm.gamma.all (%d.attn.q_norm.gamma.tokens.part) -> (%d.attn.q_norm.gamma.tokens) comm=tp "
     "#tensor-parallel\n",
     "",
     "reads %d.attn.q_norm.gamma.tokens as f32 ep:shard(0) tp:replicate micro:slice, but since %d.attn.q_norm.gamma.tokens.part "
     "was written it holds f32 ep:shard(0) tp:partial"},
    {"#1446: the last norm under sequence parallelism has the gradient of a rank's tokens", "experts-sliced", "head.B",
     "norm.W final.norm (%d.final.norm.gamma.tokens) ->", "norm.W final.norm (%d.final.norm.gamma.tokens.part) ->",
     "along tp: %d.final.norm.gamma is declared replicate, but its reads make it partial; it must be reduced"},
    {"#7160, #5956, DeepSpeed #6545, #5259, pytorch #160285, megablocks #86: gradients of experts are summed over ep once more",
     "expert-parallel-canonical", "parts.layer", "(%moe.wup.part) -> (%moe.wup.whole) comm=experts.grads",
     "(%moe.wup.part) -> (%moe.wup.whole) comm=dp.grads",
     "along ep: %moe.wup.part is shard(0), and summing unlike parts has no meaning"},
    {"transformers #48687, #48205: the router's gradient is summed over the ranks that have the same experts alone",
     "expert-parallel-canonical", "parts.layer", "(%moe.router.part) -> (%moe.router.whole) comm=dp.grads",
     "(%moe.router.part) -> (%moe.router.whole) comm=experts.grads",
     "along ep: %moe.router.whole is declared replicate, but all_reduce of partial data makes it partial"},
    {"torchtitan #2416: the router's gradient beside slices of experts is one rank's share", "experts-sliced", "layer.B",
     "(%d.moe.weights, %moe.logits, %moe.choice) -> (%d.moe.logits)",
     "(%d.moe.weights.part, %moe.logits, %moe.choice) -> (%d.moe.logits)",
     "along tp: %d.moe.weights.part is an unreduced sum, and the op is not linear in it: reduce it first"},
    {"the same of the gate of shared experts", "experts-gated", "layer.B",
     "linear.W moe.shared.gate (%mlp.norm.y, %d.shared.gate) -> (%d.moe.shared.gate)",
     "linear.W moe.shared.gate (%mlp.norm.y, %d.shared.gate.part) -> (%d.moe.shared.gate)",
     "along tp: %d.moe.shared.gate is declared replicate, but its reads make it partial; it must be reduced"},
    {"#1464: gradients of keys under cp stay the sum over one rank's queries", "context-parallel-all-gather", "layer.B",
     "reduce_scatter attn.d.keys (%d.kv.all) -> (%d.kv) comm=cp algorithm=direct", "copy attn.d.keys (%d.kv.all) -> (%d.kv)",
     "along cp: %d.kv is declared shard(1), but its reads make it partial"},
    {"#844: tied embeddings under ZeRO-1 and stages: the first stage updates by its own use alone", "dp2-tp2-pp2-zero1-tied", "",
     "  call update20 (a=%embed.tokens.grad.tied, b=%bucket3.value.shard,",
     "  call update20 (a=%bucket3.sum, b=%bucket3.value.shard,",
     "%a is bound to %bucket3.sum, whose type differs: replicate along pp expected, partial found"},
    {"open-instruct #1498: ZeRO-2 keeps the last micro-batch alone", "zero-2", "",
     "  call add.slices.8192 (a=%bucket0.sum, b=%bucket0.grad.slice)",
     "  call keep.slices.8192 (a=%bucket0.grad.slice, b=%bucket0.sum)",
     "the gradient of head.weight has 1 of the step's 2 micro-batches from head"},
};

}  // namespace

TEST_CASE("silent bugs: each is refused, and a finding names tensor, axis and sum") {
  for (const SilentBug& bug : kBugs) {
    INFO(bug.told);
    const auto findings = find_faults(parse_or_fail(broken(bug)));
    REQUIRE(!findings.empty());
    INFO(findings_text(findings));
    CHECK(std::ranges::any_of(findings, [&](const Finding& f) { return f.message.starts_with(bug.says); }));
    REQUIRE(find_faults(parse_or_fail(golden(bug.plan))).empty());
  }
}

}  // namespace shardlab::testing
