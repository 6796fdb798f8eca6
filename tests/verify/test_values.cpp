// Rules 3, 4, 5 and 7: lifetimes, names that are gone, gradients, waits, memory.
#include <fmt/format.h>

#include "plan/program.h"
#include "tests/namespaces.h"
#include "tests/test.h"
#include "tests/verify/good_plans.h"

namespace shardlab::testing {
namespace {

std::string first_finding(const std::string& text, const VerifyOptions& options = {}) {
  const auto findings = find_faults(parse_or_fail(text), options);
  return findings.empty() ? "" : fmt::format("{}: {}", name_of(findings[0].rule), findings[0].message);
}

std::string broken_training(std::string_view from, std::string_view to) {
  return first_finding(replaced(training_text(), from, to));
}
std::string broken_zero1(std::string_view from, std::string_view to) { return first_finding(replaced(zero1_text(), from, to)); }

}  // namespace

TEST_CASE("the plans to break are good") {
  CHECK(first_finding(training_text()) == "");
  CHECK(first_finding(zero1_text()) == "");
  CHECK(first_finding(pipeline_text()) == "");
}

TEST_CASE("values: lifetimes") {
  CHECK(broken_training("  free %g.head\n", "") == "values: %g.head is never freed");
  CHECK(broken_training("  call update.head (g=%s.head, p=%head)\n", "  free %g.head\n  call update.head (g=%s.head, p=%head)\n") ==
        "values: reads %g, which is not live: it was not allocated, or freed before this");
  CHECK(broken_training("  alloc %nll@1\n", "") == "values: writes storage that is not live");
  CHECK(broken_training("  alloc %nll@1\n", "  alloc %nll@1\n  alloc %nll@1\n") ==
        "values: alloc of %nll@1, which is live already");
  CHECK(broken_training("  alloc %nll@1\n", "  alloc %nll@1\n  alloc %table\n") == "values: alloc of %table, which is persistent");
  CHECK(broken_training("  free %logits\n", "") == "values: local %logits is never freed");
  CHECK(broken_training("  free %x.part\n", "  free %x.part\n  free %x.part\n") == "values: free of %x.part, which is not live");
  CHECK(broken_training("  linear.F head (%x, %head) -> (%logits)\n", "") == "values: reads %logits before it is written");
}

TEST_CASE("values: names that are gone") {
  // The gradient before the reduction is not the gradient after it.
  CHECK(broken_training("  call reduce.head (part=%g.head)\n", "") ==
        "values: reads %g as f32 dp:replicate tp:replicate micro:sum, but since %g.head was written it holds f32 dp:partial "
        "tp:replicate micro:sum");
  // Twice reduced: the first reduction left another type.
  CHECK(broken_training("  call reduce.head (part=%g.head)\n",
                        "  call reduce.head (part=%g.head)\n  call reduce.head (part=%g.head)\n")
            .starts_with("values: reads %part as f32 dp:partial tp:replicate micro:sum"));
  // A value that an op in place of it has replaced, though both have one type.
  const std::string text = R"(shardlab plan 1
name names
mesh a=1
micro_batches 1
sequences_per_micro_batch 1
period 1
streams compute
strategies by-hand

segment s
  local %x activation f32[4]
  local %y activation f32[4] view %x
  local %z activation f32[4]

  alloc %x
  alloc %z
  fill x () -> (%x) value=1
  activation.F y (%x) -> (%y)
  add z (%y, %y) -> (%z)
  free %z
  free %x

role 0

  call s ()
)";
  CHECK(first_finding(text) == "");
  CHECK(first_finding(replaced(text, "add z (%y, %y)", "add z (%y, %x)")) == "values: reads %x, which %y has overwritten");
}

TEST_CASE("values: micro-batches are not mixed") {
  std::string text = replaced(pipeline_text(), "call take m=1 (d=%d@1)", "call take m=0 (d=%d@1)");
  CHECK(first_finding(text) == "values: reads %d in micro-batch 0, but it belongs to micro-batch 1");
}

TEST_CASE("values: sharded state is whole again when the period ends") {
  CHECK(broken_zero1("  call gather (whole=%values)\n", "") ==
        "values: %values ends the period with only this rank's shard current: the next period reads the whole");
  // Gathered before the update: what is updated afterwards is a shard again.
  CHECK(broken_zero1("  call update (g=%sum, p=%mine, m=%m, v=%v)\n  call gather (whole=%values)\n",
                     "  call gather (whole=%values)\n  call update (g=%sum, p=%mine, m=%m, v=%v)\n") ==
        "values: %values ends the period with only this rank's shard current: the next period reads the whole");
  // Read between the update and the gather.
  CHECK(broken_zero1("  call gather (whole=%values)\n",
                     "  call micro m=0 (table=%table, head=%head, g.table=%g.table, g.head=%g.head, nll=%nll@0)\n  call gather "
                     "(whole=%values)\n") ==
        "values: reads %table, but only this rank's shard of it is current since %mine was written");
}

TEST_CASE("values: what is reported is whole") {
  CHECK(broken_training("  all_reduce loss.dp (%loss) -> (%whole) comm=dp\n", "") ==
        "types: %loss is reported as an unreduced sum: f32 dp:partial tp:replicate micro:sum");
  CHECK(broken_training("sum_scalars loss (%nll0, %nll1) -> (%loss)", "sum_scalars loss (%nll0) -> (%loss)") ==
        "values: %loss holds 1 of the step's 2 micro-batches");
  CHECK(broken_training("factor=1/24", "factor=1/12") ==
        "types: %loss is reported as 2/1 times what it sums up to: the mean loss of the step's targets, or the whole squared norm");
  CHECK(broken_training("factor=1/24", "factor=0/24") == "types: %loss is 0 whatever is summed: the factor is 0");
  std::string silent = training_text();
  const size_t sum = silent.find("  call loss.sum");
  silent.erase(sum, silent.find('\n', sum) + 1 - sum);
  CHECK(first_finding(silent) == "values: %loss is reported, and nothing writes it");
}

TEST_CASE("gradients: every micro-batch once") {
  CHECK(broken_training("  call micro m=1 (table=%table, head=%head, g.table=%g.table, g.head=%g.head, nll=%nll@1)\n", "")
            .starts_with("values: reads %nll1 before"));
  std::string text = replaced(training_text(), "linear.W head (%x, %logits, %g.head) -> (%g.head) accumulate",
                              "linear.W head (%x, %logits) -> (%g.head)");
  CHECK(first_finding(text) == "gradients: the gradient of head has 1 of the step's 2 micro-batches from head");
  text = replaced(training_text(), "  embed.W embed (%tokens, %d.x, %g.table) -> (%g.table) accumulate\n",
                  "  embed.W embed (%tokens, %d.x, %g.table) -> (%g.table) accumulate\n  embed.W embed (%tokens, %d.x, %g.table) "
                  "-> (%g.table) accumulate\n");
  CHECK(first_finding(text) ==
        "gradients: the gradient of table has 4 contributions from embed, more than the step's 2 micro-batches");
  text = replaced(training_text(), "call micro m=1 (table=%table, head=%head, g.table=%g.table, g.head=%g.head, nll=%nll@1)",
                  "call micro m=0 (table=%table, head=%head, g.table=%g.table, g.head=%g.head, nll=%nll@1)");
  CHECK(first_finding(text).starts_with("values: %loss holds"));
  // Where the loss is whole, the gradient tells.
  text = replaced(training_text(), "linear.W head (%x, %logits, %g.head) -> (%g.head) accumulate",
                  "linear.W head (%x, %logits, %g.head) -> (%g.head) accumulate\n  linear.W head (%x, %logits, %g.head) -> "
                  "(%g.head) accumulate");
  CHECK(first_finding(text).starts_with("gradients: the gradient of head has 4 contributions from head"));
}

TEST_CASE("gradients: every use of a parameter, and only those") {
  CHECK(broken_training("  embed.W embed (%tokens, %d.x, %g.table) -> (%g.table) accumulate\n", "") ==
        "gradients: the gradient of table lacks the contribution of embed");
  CHECK(broken_training("linear.W head (%x, %logits, %g.head) -> (%g.head) accumulate",
                        "linear.W other (%x, %logits, %g.head) -> (%g.head) accumulate") ==
        "gradients: the gradient of head lacks the contribution of head");
}

TEST_CASE("gradients: the right gradient updates each parameter, once") {
  CHECK(broken_training("  call update.head (g=%s.head, p=%head)\n", "") ==
        "gradients: 0 of the 48 elements of head are updated in a period");
  CHECK(broken_training("  call update.head (g=%s.head, p=%head)\n",
                        "  call update.head (g=%s.head, p=%head)\n  call update.head (g=%s.head, p=%head)\n") ==
        "gradients: updates head a second time");
  CHECK(broken_zero1("%g.head  gradient  f32[8,6] dp:P micro:sum view %grads offset 24 of head",
                     "%g.head  gradient  f32[8,6] dp:P micro:sum view %grads offset 24 of table")
            .starts_with("gradients: updates head with the gradient of table"));
  // A bucket laid out differently from the values that it updates.
  std::string text = zero1_text();
  text = replaced(text, "%g.table gradient  f32[4,6] dp:P tp:S0 micro:sum view %grads of table",
                  "%g.table gradient  f32[4,6] dp:P tp:S0 micro:sum view %grads offset 48 of table");
  text = replaced(text, "%g.head  gradient  f32[8,6] dp:P micro:sum view %grads offset 24 of head",
                  "%g.head  gradient  f32[8,6] dp:P micro:sum view %grads of head");
  CHECK(first_finding(text).starts_with("gradients: updates table with the gradient of head"));
}

TEST_CASE("gradients: a bucket hides no unreduced sum") {
  // Inside a bucket that is local along tp, the head's gradient is declared partial along tp: nothing ever reduces it there.
  std::string text = zero1_text();
  text = replaced(text, "%g.head  gradient  f32[8,6] dp:P micro:sum view", "%g.head  gradient  f32[8,6] dp:P tp:P micro:sum view");
  for (const std::string_view gap : {" ", "  "}) {
    const std::string from = fmt::format("bound %g.head  gradient{}f32[8,6] dp:P micro:sum", gap);
    if (const size_t at = text.find(from); at != std::string::npos) text.insert(at + from.size() - 10, " tp:P");
  }
  // A trusted kernel makes it, so that only the bucket can tell.
  text = replaced(text, "linear.W head (%x, %logits, %g.head) -> (%g.head) accumulate",
                  "kernel.W head (%x, %logits, %g.head) -> (%g.head) name=w rule=trusted");
  CHECK(first_finding(text) == "gradients: along tp: the gradient of head was never reduced");
}

TEST_CASE("gradients: optimizer operands") {
  CHECK(broken_training("segment update.head\n  bound %g gradient f32[8,6] micro:sum",
                        "segment update.head\n  bound %g gradient f32[8,6] dp:P micro:sum")
            .starts_with("form:"));
  std::string text = replaced(training_text(), "segment update.head\n  bound %g gradient f32[8,6] micro:sum",
                              "segment update.head\n  bound %g gradient f32[8,6] dp:P micro:sum");
  text = replaced(text, "call update.head (g=%s.head", "call update.head (g=%g.head");
  text = replaced(text, "  call reduce.head (part=%g.head)\n", "");
  CHECK(first_finding(text) == "gradients: along dp: the gradient %g was never reduced");
}

TEST_CASE("order: a lost wait is found") {
  const Plan plan = parse_or_fail(training_text());
  Program program = expand_program(plan, 0);
  REQUIRE(find_unordered(plan, program).empty());
  int lost = 0;
  for (Instruction& i : program.instructions)
    while (i.waits > 0) {
      Program mutant = program;
      Instruction& m = mutant.instructions[static_cast<size_t>(i.id)];
      --m.waits;
      const auto findings = find_unordered(plan, mutant);
      INFO(describe(plan, i));
      REQUIRE_FALSE(findings.empty());
      REQUIRE(findings[0].rule == Rule::kOrder);
      REQUIRE(findings[0].message.find("nothing makes it wait") != std::string::npos);
      --i.waits;
      ++lost;
    }
  REQUIRE(lost == 3);
}

TEST_CASE("memory: a plan over its budget names what is missing") {
  VerifyOptions options;
  options.budget = std::array<int64_t, kSpaces>{1 << 20, 0, 0};
  const Plan plan = parse_or_fail(training_text());
  REQUIRE(verify(plan, options).ok());
  const int64_t peak = memory_peak(plan, 0)[0].peak_bytes;
  (*options.budget)[0] = peak;
  REQUIRE(verify(plan, options).ok());
  (*options.budget)[0] = peak - 1;
  const auto refused = verify(plan, options);
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.error().code == ExitCode::kNo);
  CHECK(refused.error().message.find(
            fmt::format("it needs {} bytes of device memory, 1 more than the {} there are", peak, peak - 1)) != std::string::npos);
}

}  // namespace shardlab::testing
