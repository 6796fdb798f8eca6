// Foreign plan text: what is too large, or was cut about by a hostile hand, is refused by a message, and what is accepted can be
// expanded, placed and counted. `tests/verify/attacks` holds hand-made attacks, and the texts of which earlier versions died.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#include "plan/base/limits.h"
#include "plan/limits.h"
#include "plan/text.h"
#include "plan/verify.h"
#include "plan/wire.h"
#include "plan/work.h"
#include "tests/namespaces.h"
#include "tests/test.h"
#include "tests/verify/good_plans.h"

namespace shardlab::testing {
namespace {

std::string attack_text(const std::string& name) {
  std::ifstream file(source_dir() + "/tests/verify/attacks/" + name);
  REQUIRE(file.good());
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

/// All that `shardlab plan` does with a text. The refusal, the first finding, or "accepted".
std::string outcome_of(const std::string& text) {
  const auto plan = parse_plan(text, "attack.plan");
  if (!plan.ok()) {
    CHECK(plan.error().hint == "correct the text at this place; plan/README.md explains the syntax of plans");
    return plan.error().where + ": " + plan.error().message;
  }
  const auto findings = find_faults(*plan);
  if (!findings.empty()) return std::string(name_of(findings[0].rule)) + " | " + findings[0].op + " | " + findings[0].message;
  for (int role = 0; role < static_cast<int>(plan->roles.size()); ++role) {
    const Program program = expand_program(*plan, role);
    REQUIRE(findings_text(find_unordered(*plan, program)) == "");
    REQUIRE(findings_text(find_overlaps(*plan, program, place_arena(*plan, program))) == "");
    REQUIRE(memory_peak(*plan, role)[0].peak_bytes >= 0);
  }
  for (const Segment& segment : plan->segments)
    for (const Step& step : segment.steps)
      if (const Op* op = std::get_if<Op>(&step)) REQUIRE(work_of(segment, *op, plan->mesh).flops.value >= 0);
  for (const auto& [comm, bytes] : total_wire_bytes(*plan)) REQUIRE(bytes >= 0);
  return "accepted";
}

/// A plan without ops, with these lines in its head and then this role.
std::string bare(const std::string& head, const std::string& role) {
  return "shardlab plan 1\nname bare\n" + head + "streams compute\nstrategies by-hand\n" + role;
}

}  // namespace

TEST_CASE("attacks: every text is refused by the message that it earns, or counted") {
  const std::map<std::string, std::string> expected{
      {"call-twice.plan", "values | gather.32 parameters all_gather | reads %a before it is written"},
      {"mesh-1e9.plan", "attack.plan:3:11: expected at most 1048576 ranks, found 1000000000 along axis `dp`"},
      {"powersgd-dp4096.plan", "accepted"},
      {"size-overflow.plan",
       "attack.plan:10:13: expected at most 4398046511104 elements in a buffer, found 9223372036854775807 x 9223372036854775807"},
      {"stage-minus-five.plan", "attack.plan:9:6: expected a stage from 0 to 1048575, found -5"},
  };
  std::map<std::string, std::string> found;
  for (const auto& entry : std::filesystem::directory_iterator(source_dir() + "/tests/verify/attacks"))
    if (const std::string name = entry.path().filename().string(); name.ends_with(".plan"))
      found[name] = outcome_of(attack_text(name));
  CHECK(found == expected);
}

TEST_CASE("attacks: each limit is refused where it is passed, by number and place") {
  const std::string one = "mesh pp=1\n", role = "role 0\n";
  REQUIRE(outcome_of(bare(one, role)) == "accepted");
  const auto refused = [&](const std::string& head, const std::string& body, const std::string& message) {
    INFO(head + body);
    CHECK(outcome_of(bare(head, body)).find(message) != std::string::npos);
  };
  refused("mesh pp=1 dp=2048 tp=1024\n", role, "expected at most 1048576 ranks in all, found more with `tp=1024`");
  refused(one, "role 1\n", "roles stand in order, one a stage, from 0");
  std::string pairs = "mesh pp=1048576\n";
  for (int i = 0; i < 5; ++i) pairs += "comm c" + std::to_string(i) + " axes pp ends\n";
  refused(pairs, role, "expected at most 4194304 coordinates in groups of communicators, found more");
  refused(one + "micro_batches 1048577\n", role, "1048577 micro-batches: a plan has 1 to 1048576");
  refused(one + "period 65537\n", role, "a period of 65537 steps: a plan has 1 to 65536");
  refused(one + "sequences_per_micro_batch 0\n", role, "0 sequences a micro-batch");
  refused(one + "parameter w f32[4] stage 3 ones tensor 0\n", role, "%w is of stages 3, and the plan has stages 0 to 0, each to be named once and in order");
  refused(one, role + "  %a buffer f32[4] scale 1/4294967296 persistent\n", "expected a scale of numbers up to 2147483647");
  refused(one, role + "  %a buffer f32[4398046511105] persistent\n", "expected at most 4398046511104 elements in a buffer");
  std::string large = role;
  for (int i = 0; i < 127899; ++i) large += "  %a" + std::to_string(i) + " buffer f64[4398046511104] persistent\n";
  refused(one, large, "bytes on one rank, more than 4500000000000000000");
  refused(one, role + "  %a buffer f32[4] persistent\n  %b buffer f32[4] view %a offset 9223372036854775807\n",
          "%b begins at element 9223372036854775807 of %a, which has 4");
  const std::string product =
      "segment s\n  bound %x buffer f32[2097152,2097152]\n  bound %w buffer f32[2097152,2097152]\n  bound %y buffer "
      "f32[2097152,2097152]\n  linear.F l (%x, %w) -> (%y)\n";
  refused(one, product + role, "floating-point operations: an op does at most 9000000000000000000");
  refused(one, "segment s\n  bound %a buffer f32[4]\n" + role + "  %a buffer f32[4] persistent\n  call s l=2147483647 (a=%a)\n",
          "layer 2147483647: a plan has layers 0 to 1048575");
}

TEST_CASE("attacks: a text that is too long, or says too much when its calls are expanded, is refused before it is") {
  CHECK(to_string(parse_plan(std::string(static_cast<size_t>(limits::kPlanBytes) + 1, ' '), "long.plan").error())
            .starts_with("long.plan: the text has more than 268435456 bytes"));
  CHECK(to_string(parse_plan(std::string(static_cast<size_t>(kMaxPlanTokens) + 1, '('), "marks.plan").error())
            .starts_with("marks.plan: the text has more than 16777216 names, numbers and marks"));
  std::string text = "shardlab plan 1\nmesh pp=1\nstreams compute\nsegment s\n  bound %a buffer f32[4]\n";
  for (int i = 0; i < 4096; ++i) text += "  fill f" + std::to_string(i) + " () -> (%a)\n";
  text += "role 0\n  %a buffer f32[4] persistent\n";
  for (int i = 0; i < 1025; ++i) text += "  call s (a=%a)\n";
  CHECK(outcome_of(text).find("expected at most 4194304 ops, allocations and frees with every call expanded, found more") !=
        std::string::npos);
}

}  // namespace shardlab::testing
