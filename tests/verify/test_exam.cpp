// What comes next must be sayable without a new core word: each subject is a plan that `verify` accepts and whose program is free
// of races.
#include <algorithm>
#include <filesystem>

#include "plan/program.h"
#include "plan/text.h"
#include "tests/namespaces.h"
#include "tests/test.h"
#include "tests/verify/exam.h"
#include "tests/verify/good_plans.h"

namespace shardlab::testing {

TEST_CASE("exam: every file is a subject") {
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(testing::source_dir() + "/tests/verify/exam"))
    if (entry.path().extension() == ".plan") files.push_back(entry.path().stem().string());
  std::sort(files.begin(), files.end());
  REQUIRE(files == exam_subjects());
}

TEST_CASE("exam: every subject verifies, prints as it reads, and has no race") {
  for (const std::string& subject : exam_subjects()) {
    INFO(subject);
    const Plan plan = parse_or_fail(exam_text(subject));
    REQUIRE(findings_text(find_faults(plan)) == "");
    const std::string text = print(plan);
    REQUIRE(print(parse_or_fail(text)) == text);
    for (size_t r = 0; r < plan.roles.size(); ++r)
      REQUIRE(findings_text(find_unordered(plan, expand_program(plan, static_cast<int>(r)))) == "");
  }
}

namespace {

std::string broken_exam(const std::string& subject, std::string_view from, std::string_view to) {
  const auto findings = find_faults(parse_or_fail(replaced(exam_text(subject), from, to)));
  return findings.empty() ? "" : findings[0].message;
}

}  // namespace

TEST_CASE("exam: the bug that each technique is known for is found") {
  // Expert gradients summed over ep once more: too large by ep (Megatron-LM #7160, DeepSpeed #6545, PyTorch #160285).
  CHECK(broken_exam("moe-dropless", "  sgd experts (%g.experts, %experts) -> (%experts)\n",
                    "  all_reduce experts (%g.experts) -> (%g.experts) comm=ep.grads\n  sgd experts (%g.experts, %experts) -> "
                    "(%experts)\n") == "along ep: %g.experts is shard(0), and summing unlike parts has no meaning");
  // A router's gradient that is not reduced over ep (transformers #48687).
  CHECK(broken_exam("moe-dropless", "  all_reduce router (%g.router) -> (%gs.router) comm=ep.grads\n", "")
            .starts_with("reads %gs.router as"));
  // A norm under sequence parallelism whose weight's gradient is not reduced over tp (Megatron-LM #1446).
  CHECK(broken_exam("sequence-parallel", "  all_reduce gamma (%g.gamma) -> (%gs.gamma) comm=tp.grads\n", "")
            .starts_with("reads %gs.gamma as"));
  // Slices of a dim that is not the outermost are not contiguous: a flat gather would interleave two sequences.
  CHECK(broken_exam("sequence-parallel", "local %xn    temporary  f32[1,2,8] tp:S1", "local %xn    temporary  f32[1,2,8] tp:S2") !=
        "");
  // Attention over a slice of the sequence.
  CHECK(broken_exam("ulysses", "bound %qkv  activation f32[1,4,12] cp:S2 micro:slice\n  bound %o    activation f32[1,4,4]",
                    "bound %qkv  activation f32[1,4,12] cp:S1 micro:slice\n  bound %o    activation f32[1,4,4]")
            .starts_with("%qkv is bound to"));
  // A unit freed before its backward.
  CHECK(broken_exam("fsdp", "  call unit.B l=0 m=0", "  free %unit.0\n  call unit.B l=0 m=0")
            .starts_with("reads %w, which is not live"));
  // A bucket that the processor updated but that never came back.
  CHECK(broken_exam("cpu-adam", "  call value.in (h=%w1.h, w=%w1)\n", "") == "%w1 misses the update of w1 that %w1.h has");
  // An update outside the predicate, and a flag that only one tp rank knows.
  CHECK(broken_exam("fp16-skip", "  local %any   buffer   i32[1] view %bad", "  local %any   buffer   i32[1] tp:L view %bad") ==
        "along tp: %any is declared local, but all_reduce of partial data makes it replicate");
  // A gradient at loss scale used as it is.
  CHECK(broken_exam("fp16-skip", "segment unscale\n  bound %g     gradient f16[2,4] tp:S0 per loss_scale micro:sum",
                    "segment unscale\n  bound %g     gradient f16[2,4] tp:S0 micro:sum")
            .starts_with("%g is bound to %s, whose type differs: scale 1 expected, 1/loss_scale found"));
  // W put off beyond the life of what it reads.
  CHECK(broken_exam("zb-v", "  call layer.I l=3 m=0 (dy=%d3@0, w=%w3, dx=%d2@0)\n",
                    "  call layer.I l=3 m=0 (dy=%d3@0, w=%w3, dx=%d2@0)\n  free %d3@0\n")
            .find("which is not live") != std::string::npos);
  // PowerSGD without its second reduction.
  CHECK(broken_exam("powersgd", "  all_reduce powersgd.q (%q) -> (%q.all) comm=dp\n", "").starts_with("reads %q.all as"));
}

}  // namespace shardlab::testing
