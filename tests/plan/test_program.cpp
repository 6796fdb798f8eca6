#include "plan/program.h"

#include <fmt/format.h>

#include <set>

#include "tests/namespaces.h"
#include "tests/plan/plans.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

using testing::parsed;
using testing::random_plan;

/// "0 alloc %x", "1 f copy @comm < compute:1": position, name, stream unless it is compute, and waits.
std::string listing(const Plan& plan, const Program& program) {
  std::string out;
  for (const Instruction& i : program.instructions) {
    out += fmt::format("{} {}", i.id, describe(plan, i));
    if (i.stream != 0) out += " @" + plan.streams[static_cast<size_t>(i.stream)];
    for (const Wait& w : program.waits_of(i)) out += fmt::format(" < {}:{}", plan.streams[static_cast<size_t>(w.stream)], w.count);
    out += "\n";
  }
  return out;
}

std::string head(const std::string& streams = "compute comm copy") {
  return "shardlab plan 1\nname t\nmesh pp=1 dp=2\nstreams " + streams + "\ncomm a axes dp\ncomm b axes dp\n";
}

std::string listing_of(const std::string& text) {
  const Plan plan = parsed(text);
  return listing(plan, expand_program(plan, 0));
}

//  compute   alloc x --- w ----------------- free x
//                         \                 /
//  comm                    r1 ------------ /
//  copy                     \------- r2 --/
TEST_CASE("readers on other streams wait for the writer, a free for the readers") {
  REQUIRE(listing_of(head() + R"(
segment s
  bound %x activation f32[16]
  fill w () -> (%x)
  all_reduce r1 (%x) -> () comm=a @comm
  copy r2 (%x) -> () @copy
role 0
  %x activation f32[16]
  alloc %x
  call s (x=%x)
  free %x
)") == R"(0 alloc %x
1 s w fill
2 s r1 all_reduce @comm < compute:2
3 s r2 copy @copy < compute:2
4 free %x < comm:1 < copy:1
)");
}

//  compute   w --------------- o      o overwrites what r1 reads; r2 reads what o wrote and r1 is before it on its stream
//             \              /  |
//  comm        r1 ----------    r2
TEST_CASE("a writer waits for earlier readers, and nobody waits for what stream order gives") {
  REQUIRE(listing_of(head() + R"(
segment s
  bound %x activation f32[16]
  bound %y activation f32[16]
  fill w () -> (%x)
  fill v () -> (%y)
  copy r1 (%x) -> () @comm
  fill o () -> (%x)
  copy r2 (%x) -> () @comm
  copy r3 (%y) -> () @comm
role 0
  %x activation f32[16] persistent
  %y activation f32[16] persistent
  call s (x=%x, y=%y)
)") == R"(0 s w fill
1 s v fill
2 s r1 copy @comm < compute:1
3 s o fill < comm:1
4 s r2 copy @comm < compute:3
5 s r3 copy @comm
)");
}

//  compute   w
//             \ .
//  comm        m (reads x, writes y)
//               \ .
//  copy          r (reads x and y): waiting for m implies that w is done
TEST_CASE("a wait that another wait brings along is dropped") {
  REQUIRE(listing_of(head() + R"(
segment s
  bound %x activation f32[16]
  bound %y activation f32[16]
  fill w () -> (%x)
  copy m (%x) -> (%y) @comm
  add r (%x, %y) -> () @copy
role 0
  %x activation f32[16] persistent
  %y activation f32[16] persistent
  call s (x=%x, y=%y)
)") == R"(0 s w fill
1 s m copy @comm < compute:1
2 s r add @copy < comm:1
)");
}

//  bucket    [ a 0..32 )[ b 32..64 )      halves are independent, the whole depends on both
TEST_CASE("views conflict where their bytes overlap") {
  REQUIRE(listing_of(head() + R"(
segment s
  bound %bucket gradient f32[16]
  local %a gradient f32[8] view %bucket
  local %b gradient f32[8] view %bucket offset 8
  local %c gradient f32[2] view %b offset 1
  local %sum gradient f32[16] view %bucket
  fill a () -> (%a) @comm
  fill b () -> (%b) @copy
  copy c (%c) -> ()
  all_reduce all (%bucket) -> (%sum) comm=a
  copy a2 (%a) -> () @comm
role 0
  %bucket gradient f32[16] persistent
  call s (bucket=%bucket)
)") == R"(0 s a fill @comm
1 s b fill @copy
2 s c copy < copy:1
3 s all all_reduce < comm:1
4 s a2 copy @comm < compute:2
)");
}

//  p         [ rank 0 )[ rank 1 )[ rest )     a shard view may be any shard of its group
TEST_CASE("a shard view conflicts with the shards of the whole group and no more") {
  REQUIRE(listing_of(head() + R"(
segment s
  bound %p parameter f32[24]
  local %mine parameter f32[8] view %p shard dp
  local %other parameter f32[8] view %p offset 8
  local %rest parameter f32[8] view %p offset 16
  fill mine () -> (%mine)
  copy other (%other) -> () @comm
  copy rest (%rest) -> () @copy
role 0
  %p parameter f32[24] persistent
  call s (p=%p)
)") == R"(0 s mine fill
1 s other copy @comm < compute:1
2 s rest copy @copy
)");
}

TEST_CASE("ops of one communicator keep issue order across streams, other communicators do not") {
  REQUIRE(listing_of(head() + R"(
segment s
  bound %x activation f32[16]
  bound %y activation f32[16]
  all_reduce one (%x) -> (%x) comm=a @comm
  all_reduce two (%y) -> (%y) comm=a @copy
  send three (%y) -> () comm=b
role 0
  %x activation f32[16] persistent
  %y activation f32[16] persistent
  call s (x=%x, y=%y)
)") == R"(0 s one all_reduce @comm
1 s two all_reduce @copy < comm:1
2 s three send < copy:1
)");
}

TEST_CASE("locals belong to one call; their first use elsewhere waits for the alloc") {
  REQUIRE(listing_of(head() + R"(
segment s
  bound %x activation f32[16]
  local %t temporary f32[16]
  alloc %t
  copy u (%x) -> (%t) @comm
  free %t
role 0
  %x activation f32[16] persistent
  call s l=3 m=2 (x=%x)
  call s l=4 (x=%x)
)") == R"(0 layers.3 m2 s alloc %t
1 layers.3 m2 s u copy @comm < compute:1
2 layers.3 m2 s free %t < comm:1
3 layers.4 s alloc %t
4 layers.4 s u copy @comm < compute:3
5 layers.4 s free %t < comm:2
)");
}

TEST_CASE("a predicate is a read") {
  REQUIRE(listing_of(head() + R"(
segment s
  bound %x activation f32[16]
  bound %ok other i32[1]
  fill p () -> (%ok) @comm
  fill w () -> (%x) when %ok
role 0
  %x activation f32[16] persistent
  %ok other i32[1] persistent
  call s (x=%x, ok=%ok)
)") == R"(0 s p fill @comm
1 s w fill < comm:1
)");
}

TEST_CASE("operands say owner, offset, bytes and shard through two levels of views") {
  const Plan plan = parsed(head() + R"(
segment s
  bound %p parameter f32[8]
  local %q parameter f32[2] view %p offset 3
  local %t temporary f64[4]
  local %u temporary f64[2] view %t offset 2
  alloc %t
  copy c (%q, %u) -> (%p)
  free %t
role 0
  %bucket parameter f32[64] persistent
  %shard parameter f32[8] view %bucket offset 16 shard dp
  call s (p=%shard)
)");
  const Program program = expand_program(plan, 0);
  const Instruction& i = program.instructions[1];
  const Operand& q = program.reads(i)[0];
  REQUIRE(q.root == BufferId(0));
  REQUIRE(q.offset == (16 + 3) * 4);
  REQUIRE(q.bytes == 8);
  REQUIRE(q.shard_axes == AxisSet::of(1));
  REQUIRE(q.shard_stride == 32);
  const Operand& u = program.reads(i)[1];
  REQUIRE(!u.root);
  REQUIRE(u.local == 0);
  REQUIRE(u.offset == 16);
  REQUIRE(u.bytes == 16);
  const Operand& p = program.writes(i)[0];
  REQUIRE(p.offset == 64);
  REQUIRE(p.shard_stride == p.bytes);
  REQUIRE(p.type == &plan.segments[0].slots[0].type);
  REQUIRE(program.locals.size() == 1);
  REQUIRE(program.locals[0].bytes == 64);
  REQUIRE(program.locals[0].call == 0);
}

/// Happens-before by brute force: reach[i] holds every instruction that is complete before i begins.
std::vector<std::set<int>> reachable(const Program& program) {
  std::vector<std::set<int>> before(program.instructions.size());
  for (const Instruction& i : program.instructions) {
    const auto add = [&](int id) {
      before[static_cast<size_t>(i.id)].insert(id);
      before[static_cast<size_t>(i.id)].insert(before[static_cast<size_t>(id)].begin(), before[static_cast<size_t>(id)].end());
    };
    if (i.sequence > 0) add(program.streams[static_cast<size_t>(i.stream)][static_cast<size_t>(i.sequence - 1)]);
    for (const Wait& w : program.waits_of(i)) add(program.streams[static_cast<size_t>(w.stream)][static_cast<size_t>(w.count - 1)]);
  }
  return before;
}

/// One access as a half-open range of bytes of an owner, negative owners being locals.
struct Access {
  int owner;
  int64_t begin, end;
  bool write;
};

std::vector<Access> accesses_of(const Plan& plan, const Program& program, const Instruction& i) {
  if (i.kind != Instruction::Kind::kRun) return {{i.local >= 0 ? -1 - i.local : i.buffer.value, 0, int64_t{1} << 40, true}};
  std::vector<Access> accesses;
  const auto add = [&](const Operand& o, bool write) {
    const int64_t reach = o.shard_axes.empty() ? o.bytes : o.shard_stride * (plan.mesh.size(o.shard_axes) - 1) + o.bytes;
    accesses.push_back({o.local >= 0 ? -1 - o.local : o.root.value, o.offset, o.offset + reach, write});
  };
  for (const Operand& o : program.reads(i)) add(o, false);
  for (const Operand& o : program.writes(i)) add(o, true);
  return accesses;
}

bool conflict(const std::vector<Access>& a, const std::vector<Access>& b) {
  for (const Access& x : a)
    for (const Access& y : b)
      if (x.owner == y.owner && (x.write || y.write) && x.begin < y.end && y.begin < x.end) return true;
  return false;
}

TEST_CASE("on random plans every conflict is ordered and no wait can be left out") {
  int waits = 0;
  for (uint64_t seed = 0; seed < 40; ++seed) {
    const Plan plan = random_plan(seed);
    Program program = expand_program(plan, 0);
    const auto before = reachable(program);
    std::vector<std::vector<Access>> accesses;
    for (const Instruction& i : program.instructions) accesses.push_back(accesses_of(plan, program, i));
    bool ordered = true;
    for (size_t i = 0; i < accesses.size(); ++i)
      for (size_t j = 0; j < i; ++j)
        if (conflict(accesses[i], accesses[j])) ordered = ordered && before[i].contains(static_cast<int>(j));
    INFO(listing(plan, program));
    REQUIRE(ordered);
    for (const Instruction& i : program.instructions)
      for (const Wait& w : program.waits_of(i)) {
        // The wait's target must not be reachable without it: through the stream's own past or through another wait.
        const int target = program.streams[static_cast<size_t>(w.stream)][static_cast<size_t>(w.count - 1)];
        bool implied = false;
        if (i.sequence > 0)
          implied = before[static_cast<size_t>(program.streams[static_cast<size_t>(i.stream)][static_cast<size_t>(i.sequence - 1)])]
                        .contains(target);
        for (const Wait& other : program.waits_of(i))
          if (other.stream != w.stream)
            implied =
                implied || before[static_cast<size_t>(
                                      program.streams[static_cast<size_t>(other.stream)][static_cast<size_t>(other.count - 1)])]
                               .contains(target);
        REQUIRE(!implied);
        // ... and it must serve a conflict: the target itself is one, since a wait names the last instruction it needs.
        REQUIRE(conflict(accesses[static_cast<size_t>(i.id)], accesses[static_cast<size_t>(target)]));
        ++waits;
      }
  }
  REQUIRE(waits > 1000);
}

}  // namespace
}  // namespace shardlab::testing
