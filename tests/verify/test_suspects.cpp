// Plans that are wrong in one thing, each refused by the finding that names it, and right ones that look as unusual.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#include "plan/memory.h"
#include "plan/program.h"
#include "plan/text.h"
#include "plan/verify.h"
#include "tests/namespaces.h"
#include "tests/test.h"
#include "tests/verify/good_plans.h"

namespace shardlab::testing {
namespace {

std::string suspect_text(const std::string& name) {
  std::ifstream file(source_dir() + "/tests/verify/suspects/" + name + ".plan");
  INFO(name);
  REQUIRE(file.good());
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

/// The first finding, or "accepted" of a plan that prints as it reads and whose program has no race.
std::string verdict_on(const std::string& text) {
  const Plan plan = parse_or_fail(text);
  const auto findings = find_faults(plan);
  if (!findings.empty()) return fmt::format("{} | {} | {}", name_of(findings[0].rule), findings[0].op, findings[0].message);
  REQUIRE(print(parse_or_fail(print(plan))) == print(plan));
  for (int role = 0; role < static_cast<int>(plan.roles.size()); ++role) {
    const Program program = expand_program(plan, role);
    REQUIRE(findings_text(find_unordered(plan, program)) == "");
    REQUIRE(findings_text(find_overlaps(plan, program, place_arena(plan, program))) == "");
  }
  return "accepted";
}

/// Whether a finding on the plan with one text replaced says `message`.
bool finds(const std::string& name, std::string_view from, std::string_view to, std::string_view message) {
  return findings_text(find_faults(parse_or_fail(replaced(suspect_text(name), from, to)))).find(message) != std::string::npos;
}

}  // namespace

TEST_CASE("suspects: every text is refused by tensor, axis and rule, or accepted") {
  const std::map<std::string, std::string> expected{
      {"il-nocyc", "accepted"},
      {"moe-wrongw",
       "values | layers.0 m0 moe.B moe.tokens all_to_all | nothing reads the %d.out that it makes, and it is not kept"},
      {"noblock1", "values | layers.0 m0 attn.F recv.kv recv | nothing reads the %kv1 that came along cp, and it is not kept"},
      {"nohome",
       "values | layers.0 m0 attn.B recv.d.kv.home recv | nothing reads the %d.kv that came along cp, and it is not kept"},
      {"order0321",
       "values | layers.3 m0 layer.F proj linear.F | reads %x, and what layers.0 m0 proj made on stage 0 along pp is there: layer "
       "3 "
       "reads what layer 2 made"},
  };
  std::map<std::string, std::string> found;
  for (const auto& entry : std::filesystem::directory_iterator(source_dir() + "/tests/verify/suspects"))
    if (entry.path().extension() == ".plan") found[entry.path().stem()] = verdict_on(suspect_text(entry.path().stem()));
  CHECK(found == expected);
}

TEST_CASE("suspects: text may begin with comments") {
  CHECK(verdict_on("// What it is.\n\n  // And why.\n" + suspect_text("il-nocyc")) == "accepted");
}

TEST_CASE("suspects: a model's layers are applied in order, whichever stage has them") {
  // The boundary below layer 2 arrives where layer 3 is computed, of the right micro-batch.
  CHECK(finds("il-nocyc", "call send.fwd.down m=0 (x=%x3@0)", "call send.fwd.down m=0 (x=%x2@0)",
              "layers.3 m0 layer.F proj linear.F | reads %x, and what layers.1 m0 proj made"));
  // Layer 0 a second time in the place of layer 2.
  CHECK(finds("il-nocyc", "call layer.F l=2 m=0 (x=%x2@0", "call layer.F l=2 m=0 (x=%x1@0", "layer 2 reads what layer 1 made"));
}

}  // namespace shardlab::testing
