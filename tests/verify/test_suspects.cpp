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
      {"dp4e", "accepted"},
      {"dp4m", "accepted"},
      {"il-nocyc", "accepted"},
      {"moe-badcount",
       "types | moe.F moe.back all_to_all | along ep: the rows of %out are counted by %recv.rows, and they are moved by "
       "%send.rows"},
      {"moe-nocounts",
       "types | moe.F moe.tokens all_to_all | along ep: the rows of %permuted are counted by %send.rows, and it reads no counts"},
      {"moe-norouter-path",
       "values | layers.0 m0 moe.B moe.combine kernel.I | reads %scores, and what layers.0 m0 moe.router made is there: the "
       "forward "
       "op of this label neither read nor made it"},
      {"moe-wrongw",
       "values | layers.0 m0 moe.B moe.tokens all_to_all | nothing reads the %d.out that comes along ep, and it is not kept"},
      {"nest",
       "types | f x.cp all_gather | along cp: tp cuts dim 1 of %x within the slices of cp, and only the innermost cut is gathered, "
       "made or moved"},
      {"noblock1", "values | layers.0 m0 attn.F recv.kv recv | nothing reads the %kv1 that comes along cp, and it is not kept"},
      {"nohome",
       "values | layers.0 m0 attn.B recv.d.kv.home recv | nothing reads the %d.kv that comes along cp, and it is not kept"},
      {"order0321",
       "values | layers.3 m0 layer.F proj linear.F | reads %x, and what layers.0 m0 proj made on stage 0 along pp is there: layer "
       "3 "
       "reads what layer 2 made"},
      {"ring4",
       "values | layers.0 m0 attn.B attn.kv linear.W | along cp: reads %d.kv as the rank's own, and it is 2 of 4 hops away from "
       "home"},
      {"ring4-whole", "accepted"},
      {"sp2", "accepted"},
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

TEST_CASE("suspects: stages in groups give one gradient, each micro-batch once") {
  const auto with_groups = [](const std::string& groups, std::string_view message) {
    return finds("dp4e", "comm ends axes pp ends", "comm ends axes pp groups " + groups, message);
  };
  // A stage meets its neighbour and not its mirror image, nobody, or all.
  CHECK(with_groups("0,1 2,3", "the gradient of w0 is added up with that of w1 from stage 1"));
  CHECK(with_groups("0,3 1 2", "messages | sum sum all_reduce | stage 1 stands alone in `ends`"));
  CHECK(
      finds("dp4e", "comm ends axes pp ends", "comm ends axes pp", "the gradient of w0 is added up with that of w1 from stage 2"));
  // A micro-batch that both holders ran.
  CHECK(finds("dp4e", "  call W+ l=0 m=3 (x=%x@3, dy=%d@3, g=%g)", "  call W+ l=0 m=2 (x=%x@2, dy=%d@3, g=%g)", "micro-batch"));
  // Messages: to the other parameter's stage; twice what came, and nothing of one's own.
  CHECK(finds("dp4m", "  send send.g (%g) -> () comm=down hop=3 @s", "  send send.g (%g) -> () comm=down hop=2 @s", "messages | "));
  CHECK(finds("dp4m", "  call recv.far.up (g=%o)\n  alloc %s\n  call add (a=%g, b=%o, c=%s)",
              "  call recv.far.up (g=%o)\n  alloc %s\n  call add (a=%o, b=%o, c=%s)", "gradients | "));
  for (const auto& [groups, message] :
       std::map<std::string, std::string>{{"0,3 1,1", "each of the 4 coordinates along `pp` is in one group, and 1 is not"},
                                          {"0,3 1", "coordinate 2 along `pp` is in no group"},
                                          {"0,3 1,4 2", "each of the 4 coordinates along `pp` is in one group, and 4 is not"},
                                          {"0,1,2 3,0", "has groups of 2 and of 3: one size, but that a stage may stand alone"}})
    CHECK(with_groups(groups, message));
}

TEST_CASE("suspects: blocks that go round a ring are read once each, with their like, and come home") {
  // Two blocks of four, brought home the way that they came.
  const std::string back = replaced(replaced(suspect_text("ring4"), "send send.d.kv.home (%d.kv1+) -> () comm=ring.grads cyclic",
                                             "send send.d.kv.home (%d.kv1+) -> () comm=ring.grads hop=-1 cyclic"),
                                    "recv recv.d.kv.home () -> (%d.kv) comm=ring.grads cyclic",
                                    "recv recv.d.kv.home () -> (%d.kv) comm=ring.grads hop=1 cyclic");
  CHECK(
      verdict_on(back) ==
      "values | layers.0 m0 attn.F attn.block1 kernel.F | along cp: what layers.0 m0 attn.kv made goes round a ring of 4, and its "
      "block 1 hops away is read 0 times, another 1 times");
  // A block twice, forward; and the gradient of one block added to that of another.
  CHECK(finds("ring4-whole", "attn.block2 (%q, %kv2, %o1", "attn.block2 (%q, %kv1, %o1", "block 1 hops away is read 1 times") ==
        false);
  CHECK(finds("ring4-whole", "attn.block2 (%q, %kv2, %o1", "attn.block2 (%q, %kv1, %o1", "neither read nor made it"));
  CHECK(finds("ring4-whole", "%kv2, %d.q1, %d.kv2) -> ", "%kv1, %d.q1, %d.kv2) -> ",
              "along cp: reads %d.kv2, which has come 2 hops, with what has come 3"));
  CHECK(finds("ring4-whole", "send send.d.kv.home (%d.kv3+)", "send send.d.kv.home (%d.kv2+)",
              "and it is 1 of 4 hops away from home"));
}

TEST_CASE("suspects: rows that are counted move by their counts") {
  const std::string moe =
      replaced(suspect_text("moe-badcount"), "all_to_all moe.back (%out, %send.rows)", "all_to_all moe.back (%out, %recv.rows)");
  CHECK(verdict_on(moe) == "accepted");
  CHECK(verdict_on(replaced(moe, "f32[1,16,4] ep:S0 micro:slice count %recv.rows\n  local %returned",
                            "f32[1,16,4] ep:S0 micro:slice\n  local %returned")) ==
        "types | moe.F moe.back all_to_all | along ep: of %out and %returned only one counts its rows");
}

TEST_CASE("suspects: cuts nest in the order of the mesh") {
  const std::string_view wrong = "  all_gather x.cp (%x) -> (%half) comm=cp\n  all_gather x.tp (%half) -> (%xg) comm=tp\n";
  const std::string_view right = "  all_gather x.tp (%x) -> (%half) comm=tp\n  all_gather x.cp (%half) -> (%xg) comm=cp\n";
  CHECK(finds("nest", wrong, right, "along tp: %half is declared shard(1), but all_gather of shard(1) data makes it replicate"));
  const std::string text = replaced(replaced(suspect_text("nest"), wrong, right), "local %half buffer f32[1,2,8] tp:S1",
                                    "local %half buffer f32[1,2,8] cp:S1");
  CHECK(verdict_on(text) == "accepted");
}

}  // namespace shardlab::testing
