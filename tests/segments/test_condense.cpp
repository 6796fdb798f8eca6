// What a plan is condensed to: nothing is lost, and little is left.
#include <map>
#include <string>
#include <vector>

#include "tests/namespaces.h"
#include "tests/segments/both.h"
#include "tests/simulator/plans.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

using namespace testing;
using namespace segments;

/// Ops of one stage by how often they run, over all its streams.
std::vector<int64_t> ops_run(const Condensed& text, const StageEntries& stage) {
  std::vector<int64_t> count(text.ops.size(), 0);
  for (const auto& stream : stage.streams)
    for (const Entry& e : stream) {
      if (e.op >= 0) ++count[static_cast<size_t>(e.op)];
      if (e.stretch < 0) continue;
      for (const Repeated& r : text.stretches[static_cast<size_t>(e.stretch)].pieces)
        for (const int32_t op : text.pieces[static_cast<size_t>(r.piece)].ops) count[static_cast<size_t>(op)] += r.times;
    }
  return count;
}

void require_complete(const Plan& plan, const std::vector<Program>& programs) {
  const Condensed text = condense(plan, programs);
  REQUIRE(text.stages.size() == programs.size());
  for (size_t s = 0; s < programs.size(); ++s) {
    std::vector<int64_t> expected(text.ops.size(), 0);
    const std::vector<int64_t> found = ops_run(text, text.stages[s]);
    std::map<const Op*, int64_t> by_op, found_by_op;
    for (const Instruction& i : programs[s].instructions)
      if (i.op != nullptr) ++by_op[i.op];
    for (size_t op = 0; op < found.size(); ++op)
      if (found[op] > 0) found_by_op[text.ops[op].example.op] += found[op];
    REQUIRE(found_by_op == by_op);
  }
}

}  // namespace

TEST_CASE("every op of a program is in exactly one entry of what it is condensed to") {
  const Expanded small = pipeline(3, 4, true);
  require_complete(*small.plan, small.programs);
  Case c = gpt3_175b(2, 3);
  require_complete(*lowered(c).plan, lowered(c).programs);
}

TEST_CASE("a plan that nobody expanded is condensed to the same") {
  Case c = gpt3_175b(2, 3);
  c.layout.dp = 2, c.layout.zero = 3;
  c.machine.nodes = 4;
  const Lowered l = lowered(c);
  const Condensed a = condense(*l.plan, l.programs), b = condense(*l.plan);
  REQUIRE(a.instructions == b.instructions);
  REQUIRE(a.ops.size() == b.ops.size());
  REQUIRE(a.stretches.size() == b.stretches.size());
  for (size_t s = 0; s < a.stretches.size(); ++s) CHECK(a.stretches[s].pieces == b.stretches[s].pieces);
  REQUIRE(a.stages.size() == b.stages.size());
  for (size_t s = 0; s < a.stages.size(); ++s) {
    CHECK(a.stages[s].streams == b.stages[s].streams);
    REQUIRE(a.stages[s].waits.size() == b.stages[s].waits.size());
    for (size_t w = 0; w < a.stages[s].waits.size(); ++w) {
      CHECK(a.stages[s].waits[w].stream == b.stages[s].waits[w].stream);
      CHECK(a.stages[s].waits[w].count == b.stages[s].waits[w].count);
    }
  }
  const DatasheetCostModel costs(c.machine, Precision::kBf16);
  CHECK(SegmentTimeline(*l.plan, l.programs).step(c.machine, costs).seconds ==
        SegmentTimeline(*l.plan).step(c.machine, costs).seconds);
}

TEST_CASE("a step of 175B on 8 stages with 64 micro-batches is a few thousand entries") {
  const Lowered l = lowered(gpt3_175b(8, 64));
  const Condensed text = condense(*l.plan, l.programs);
  CHECK(text.instructions > 400'000);
  CHECK(text.entries() < 5'000);
  CHECK(text.stretches.size() < 50);
  // Each of the 7 boundaries is passed twice by each micro-batch.
  CHECK(text.parties.size() == 7u * 2 * 64);
}

TEST_CASE("a stretch ends where others wait for it, and begins where it waits for others") {
  const Expanded e = expanded(R"(shardlab plan 1
name overlap
mesh dp=2
streams compute comm
comm grads axes dp

segment s
  bound %x activation f32[16]
  bound %g gradient f32[16] dp:P
  bound %z activation f32[16]
  local %sum gradient f32[16] view %g

  copy a (%x) -> (%z)
  copy b (%x) -> (%g)
  all_reduce reduce (%g) -> (%sum) comm=grads @comm
  copy c (%x) -> (%z)
  copy d (%x) -> (%z)
  copy e (%sum) -> (%z)
  copy f (%x) -> (%z)

role 0
  %x activation f32[16] persistent
  %g gradient f32[16] dp:P persistent
  %z activation f32[16] persistent
  call s (x=%x, g=%g, z=%z)
)");
  const Condensed text = condense(*e.plan, e.programs);
  REQUIRE(text.stages.size() == 1);
  const StageEntries& stage = text.stages[0];
  const auto labels = [&](const Entry& entry) {
    std::string out;
    if (entry.op >= 0) out += text.ops[static_cast<size_t>(entry.op)].example.op->label;
    if (entry.stretch >= 0)
      for (const Repeated& r : text.stretches[static_cast<size_t>(entry.stretch)].pieces)
        for (const int32_t op : text.pieces[static_cast<size_t>(r.piece)].ops)
          out += text.ops[static_cast<size_t>(op)].example.op->label;
    return out;
  };
  REQUIRE(stage.streams[0].size() == 3);
  CHECK(labels(stage.streams[0][0]) == "ab");
  CHECK(stage.streams[0][0].awaited);
  CHECK(stage.streams[0][0].launches == 0);
  CHECK(labels(stage.streams[0][1]) == "cd");
  CHECK_FALSE(stage.streams[0][1].awaited);
  CHECK(stage.streams[0][1].launches == 3);  // a, b and the reduction
  CHECK(labels(stage.streams[0][2]) == "ef");
  REQUIRE(stage.waits_of(stage.streams[0][2]).size() == 1);
  REQUIRE(stage.streams[1].size() == 1);
  CHECK(labels(stage.streams[1][0]) == "reduce");
  REQUIRE(stage.waits_of(stage.streams[1][0]).size() == 1);
  CHECK(stage.waits_of(stage.streams[1][0])[0].count == 1);  // of entries: "ab"
  CHECK(stage.streams[1][0].awaited);
}

}  // namespace shardlab::testing
