#include <algorithm>

#include "plan/collective_steps.h"
#include "plan/wire.h"
#include "plan/work.h"
#include "tests/namespaces.h"
#include "tests/plan/plans.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

using testing::parsed;

Plan two_stages() {
  return parsed(R"(shardlab plan 1
mesh pp=2 dp=3 tp=2
streams compute comm
comm dp axes dp
comm tp axes tp
comm pp.fwd axes pp
comm tied axes pp ends

segment first
  bound %x activation bf16[4,5]
  all_reduce a (%x) -> (%x) comm=tp
  send s (%x) -> () comm=pp.fwd
segment last
  bound %x activation bf16[4,5]
  recv r () -> (%x) comm=pp.fwd
  all_reduce a (%x) -> (%x) comm=tp
segment grads
  bound %g gradient f32[10]
  bound %p parameter f32[5]
  all_reduce d (%g) -> (%g) comm=dp
  all_gather t (%p) -> (%g) comm=tied
role 0
  %x activation bf16[4,5] persistent
  %g gradient f32[10] persistent
  %p parameter f32[5] persistent
  call first m=0 (x=%x)
  call first m=1 (x=%x)
  call first m=2 (x=%x)
  call grads (g=%g, p=%p)
role 1
  %x activation bf16[4,5] persistent
  %g gradient f32[10] persistent
  %p parameter f32[5] persistent
  call last m=0 (x=%x)
  call last m=1 (x=%x)
  call last m=2 (x=%x)
  call grads (g=%g, p=%p)
)");
}

TEST_CASE("wire bytes of a rank, by communicator, uneven parts included") {
  const Plan plan = two_stages();
  // dp: 10 elements in parts of 3, 3, 4 around a ring of 3; rank 0 sends parts 2, 1 then 0, 2: 4 + 3 + 3 + 4 = 14 of 4 bytes.
  REQUIRE(wire_bytes(plan, {0, 0, 0}) ==
          std::map<std::string, int64_t>{{"dp", 56}, {"tp", 3 * 40}, {"pp.fwd", 3 * 40}, {"tied", 20}});
  REQUIRE(wire_bytes(plan, {1, 0, 1}) == std::map<std::string, int64_t>{{"dp", 56}, {"tp", 3 * 40}, {"tied", 20}});
  // rank 1 sends parts 0, 2 then 1, 0: 3 + 4 + 3 + 3 = 13.
  REQUIRE(wire_bytes(plan, {0, 1, 0}).at("dp") == 52);
}

TEST_CASE("the total is the sum over ranks") {
  const Plan plan = two_stages();
  std::map<std::string, int64_t> sum;
  for (int rank = 0; rank < plan.mesh.world_size(); ++rank)
    for (const auto& [comm, bytes] : wire_bytes(plan, plan.mesh.coordinates(rank))) sum[comm] += bytes;
  REQUIRE(total_wire_bytes(plan) == sum);
  REQUIRE(sum.at("dp") == 4 * 2 * 10 * 2 * 4);  // 2n(g-1) elements in each of 4 groups
  REQUIRE(sum.at("pp.fwd") == 3 * 40 * 6);      // first stage only
}

TEST_CASE("a send that leaves the mesh sends nothing unless it wraps") {
  Plan plan = two_stages();
  Send& send = std::get<Send>(std::get<Op>(plan.segments[0].steps[1]).work);
  send.hop = 2;
  REQUIRE(wire_bytes(plan, {0, 0, 0}).at("pp.fwd") == 0);
  send.hop = -1;
  REQUIRE(wire_bytes(plan, {0, 0, 0}).at("pp.fwd") == 0);
  send.cyclic = true;
  REQUIRE(wire_bytes(plan, {0, 0, 0}).at("pp.fwd") == 3 * 40);
  send.hop = 2;
  REQUIRE(wire_bytes(plan, {0, 0, 0}).at("pp.fwd") == 0);  // to itself
}

TEST_CASE("a communicator of mirror images costs nothing where a stage stands alone") {
  Plan plan = two_stages();
  plan.mesh.axes[0].size = 3;
  plan.roles.insert(plan.roles.begin() + 1, plan.roles[1]);
  std::ranges::find(plan.comms, "tied", &Comm::name)->groups = mirror_pairs(3);
  REQUIRE(wire_bytes(plan, {0, 0, 0}).at("tied") == 20);
  REQUIRE(wire_bytes(plan, {1, 0, 0}).at("tied") == 0);
  REQUIRE(wire_bytes(plan, {2, 0, 0}).at("tied") == 20);
}

struct Amounts {
  int64_t flops, memory, payload;
  friend bool operator==(const Amounts&, const Amounts&) = default;
};
std::ostream& operator<<(std::ostream& out, const Amounts& a) {
  return out << a.flops << " flops, " << a.memory << " bytes, " << a.payload;
}

/// Work of the op of a segment with these slots.
Amounts work_in(const std::string& slots, const std::string& op) {
  const Plan plan = parsed("shardlab plan 1\nmesh tp=4\nstreams compute\ncomm tp axes tp\nsegment s\n" + slots + op + "\n");
  const Segment& segment = plan.segments[0];
  const WorkAmount w = work_of(segment, std::get<Op>(segment.steps[0]), plan.mesh);
  return {w.flops.value, w.memory.value, w.payload.value};
}

TEST_CASE("work of each op, by hand") {
  const std::string slots =
      "bound %x activation f32[2,3,8]\nbound %w parameter f32[5,8]\nbound %b parameter f32[5]\nbound %y activation f32[2,3,5]\n"
      "bound %qkv activation f32[2,3,16]\nbound %o activation f32[2,3,8]\nbound %lse activation f32[2,2,3]\nbound %ids input "
      "i32[2,3]\n"
      "bound %table parameter f32[100,8]\nbound %g parameter f32[8]\nbound %st activation f32[2,3,2]\nbound %u activation "
      "f32[2,3,16]\n";
  const auto work = [&](const std::string& op) { return work_in(slots, op); };
  const int64_t x = 48 * 4, w = 40 * 4, y = 30 * 4, b = 20;
  REQUIRE(work("linear.F a (%x, %w, %b) -> (%y) bias") == Amounts{2 * 6 * 5 * 8 + 30, x + w + b + y, 0});
  REQUIRE(work("linear.I a (%y, %w) -> (%x)") == Amounts{2 * 6 * 5 * 8, x + w + y, 0});
  REQUIRE(work("linear.W a (%x, %y) -> (%w, %b) bias") == Amounts{2 * 6 * 5 * 8 + 30, x + w + b + y, 0});
  REQUIRE(work("linear.W a (%x, %y, %w) -> (%w) accumulate") == Amounts{2 * 6 * 5 * 8, x + 2 * w + y, 0});
  // 2 sequences, 2 heads of 4, 3 tokens: 6 causal pairs a head
  REQUIRE(work("attention.F a (%qkv) -> (%o, %lse) heads=2 kv_heads=1 head_dim=4") == Amounts{24 * (4 * 4 + 5), 2 * x + x + 48, 0});
  REQUIRE(work("attention.I a (%o, %o, %lse, %qkv) -> (%qkv) heads=2 kv_heads=1 head_dim=4") ==
          Amounts{24 * (10 * 4 + 6) + 2 * 48, 2 * x + 48 + 4 * x, 0});
  // 3 of 4 groups of rows (2 query heads, 1 key) turn; 3 flops an element
  REQUIRE(work("rope.F a (%qkv) -> (%qkv) heads=2 kv_heads=1 head_dim=4") == Amounts{96 / 4 * 3 * 3, 4 * x, 0});
  REQUIRE(work("embed.F a (%ids, %table) -> (%x)") == Amounts{0, 24 + 2 * x, 0});
  REQUIRE(work("embed.W a (%ids, %x) -> (%table)") == Amounts{48, 24 + x + 3200, 0});
  REQUIRE(work("norm.F a (%x, %g, %g) -> (%x, %st)") == Amounts{48 * 8, x + 64 + x + 48, 0});
  REQUIRE(work("norm.F a (%x, %g) -> (%x, %st) rms") == Amounts{48 * 4, x + 32 + x + 48, 0});
  REQUIRE(work("activation.F a (%u) -> (%x) swiglu") == Amounts{48 * 5, 3 * x, 0});
  REQUIRE(work("activation.F a (%x) -> (%x)") == Amounts{48 * 9, 2 * x, 0});
  REQUIRE(work("cross_entropy a (%u, %ids) -> (%g, %u) tokens=6") == Amounts{96 * 8, 4 * x + 24 + 32, 0});
  REQUIRE(work("adamw a (%g, %g, %g, %g) -> (%g, %g, %g)") == Amounts{8 * 14, 7 * 32, 0});
  REQUIRE(work("adamw a (%g, %g, %g, %g) -> (%g, %g, %g) weight_decay=0.1") == Amounts{8 * 16, 7 * 32, 0});
  REQUIRE(work("kernel.F a (%x) -> (%y) name=route flops=77") == Amounts{77, x + y, 0});
  REQUIRE(work("copy a (%x) -> (%x)") == Amounts{0, 2 * x, 0});
  REQUIRE(work("all_reduce a (%x) -> (%x) comm=tp") == Amounts{0, 2 * x, x});
  REQUIRE(work("all_gather a (%x) -> (%u) comm=tp") == Amounts{0, 3 * x, 2 * x});
  REQUIRE(work("reduce_scatter a (%u) -> (%x) comm=tp") == Amounts{0, 3 * x, 2 * x});
  REQUIRE(work("send a (%x) -> () comm=tp") == Amounts{0, x, x});
  REQUIRE(work("recv a () -> (%x) comm=tp") == Amounts{0, x, x});
}

TEST_CASE("extents of a linear as a matmul, in every phase") {
  const Plan plan = parsed(R"(shardlab plan 1
streams compute
segment s
  bound %x activation f32[2,3,8]
  bound %w parameter f32[5,8]
  bound %y activation f32[2,3,5]
  linear.F a (%x, %w) -> (%y)
  linear.I a (%y, %w) -> (%x)
  linear.W a (%x, %y) -> (%w)
)");
  const Segment& s = plan.segments[0];
  REQUIRE(matmul_extents(s, std::get<Op>(s.steps[0])) == std::vector<int64_t>{6, 5, 8});
  REQUIRE(matmul_extents(s, std::get<Op>(s.steps[1])) == std::vector<int64_t>{6, 8, 5});
  REQUIRE(matmul_extents(s, std::get<Op>(s.steps[2])) == std::vector<int64_t>{5, 8, 6});
}

}  // namespace
}  // namespace shardlab::testing
