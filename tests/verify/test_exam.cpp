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
  // Attention over parts: a block left out, met twice, of another turn than the mask's; a running result that is begun anew.
  const auto ring = [](std::string_view from, std::string_view to) {
    return findings_text(find_faults(parse_or_fail(replaced(exam_text("zigzag-ring-attention"), from, to))));
  };
  const auto merged = [](std::string_view from, std::string_view to) {
    return findings_text(find_faults(parse_or_fail(replaced(exam_text("merged-ring-attention"), from, to))));
  };
  CHECK(ring("  attention_block.F attn.block3 (%q, %kv3, %o2, %l2) -> (%o3, %l3) heads=2 kv_heads=1 head_dim=4 turn=-3 carry\n", "")
            .find("attn.block2 made is there: an attention to 3 of 4 blocks of keys") != std::string::npos);
  CHECK(ring("(%q, %kv2, %o1, %l1) -> (%o2, %l2) heads=2 kv_heads=1 head_dim=4 turn=-2",
             "(%q, %kv2, %o1, %l1) -> (%o2, %l2) heads=2 kv_heads=1 head_dim=4 turn=-1")
            .find("turn=-1, and %kv2 has come 2 hops") != std::string::npos);
  CHECK(ring("attn.block2 (%q, %kv2, %o1", "attn.block2 (%q, %kv1, %o1").find("turn=-2, and %kv1 has come 3 hops") !=
        std::string::npos);
  CHECK(ring("attn.block1 (%q, %kv1, %o, %lse) -> (%o1, %l1) heads=2 kv_heads=1 head_dim=4 turn=-1 carry",
             "attn.block1 (%q, %kv1) -> (%o1, %l1) heads=2 kv_heads=1 head_dim=4 turn=-1")
            .find("an attention to 3 of 4 blocks of keys") != std::string::npos);
  // Gradients of keys: those of the ranks before dropped, of the own block alone, of another block.
  CHECK(ring("(%d.o, %o, %lse, %q, %kv2, %d.q1, %d.kv2) -> (%d.q2, %d.kv2+) heads=2 kv_heads=1 head_dim=4 turn=-2 carry carry_kv",
             "(%d.o, %o, %lse, %q, %kv2, %d.q1) -> (%d.q2, %d.kv2+) heads=2 kv_heads=1 head_dim=4 turn=-2 carry")
            .find("reads %d.kv, which is not the gradient of what layers.0 m0 attn.kv made") != std::string::npos);
  CHECK(ring("linear.W attn.kv (%x, %d.kv)", "linear.W attn.kv (%x, %d.kv0)").find("reads %d.kv0, which is not the gradient") !=
        std::string::npos);
  CHECK(ring("%lse, %q, %kv1, %d.q, %d.kv1)", "%lse, %q, %kv2, %d.q, %d.kv1)")
            .find("reads %d.kv1, which has come 3 hops, with what has come 2") != std::string::npos);
  // Parts merged in another order than that of the ranks, twice, with the sums of another, or at another rank.
  CHECK(merged("%o1, %sums1, %o2, %sums2,", "%o2, %sums2, %o1, %sums1,")
            .find("takes %o2 for that of the block 3 ranks away, and it is of 2 of 4") != std::string::npos);
  CHECK(merged("%d.home1, %d.home2, %d.home3)", "%d.home2, %d.home1, %d.home3)")
            .find("takes %d.home2 for that of the block 3 ranks away, and it is of the one 2 away") != std::string::npos);
  CHECK(merged("(%d.q0, %d.q1,", "(%d.q0, %d.q0,").find("takes %d.q0 for that of the block 3 ranks away") != std::string::npos);
  CHECK(merged("(%o0, %sums0, %o1, %sums1,", "(%o0, %sums0, %o1, %sums0,")
            .find("merges %o1 and %sums0, which are not the results of one partial block") != std::string::npos);
  CHECK(merged("(%d.home2) comm=ring.grads hop=2 cyclic", "(%d.home2) comm=ring.grads hop=1 cyclic")
            .find("reads %d.home2 as the rank's own, and it is 1 of 4 hops away from home") != std::string::npos);
  // Gathered keys: attention to the rank's own alone, and a gradient of all keys that is not summed over the ranks.
  CHECK(findings_text(find_faults(parse_or_fail(replaced(exam_text("gathered-attention"), "attention_block.F attn.core (%q, %all)",
                                                         "attention_block.F attn.core (%q, %kv)"))))
            .find("an attention to 1 of 4 blocks of keys") != std::string::npos);
  CHECK(broken_exam("gathered-attention", "  reduce_scatter attn.keys (%d.all) -> (%d.kv) comm=ring\n", "") ==
        "reads %d.kv before it is written");
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
