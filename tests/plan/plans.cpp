#include "tests/plan/plans.h"

#include <fmt/format.h>

#include "plan/base/philox.h"
#include "plan/text.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {

Plan parsed(const std::string& text) {
  Result<Plan> plan = parse_plan(text);
  INFO((plan.ok() ? std::string() : to_string(plan.error())));
  REQUIRE(plan.ok());
  return std::move(plan).value();
}

std::string small_plan_text() {
  return R"(shardlab plan 1
name linear.dp2
mesh pp=1 dp=2 cp=1 tp=1
micro_batches 1
sequences_per_micro_batch 2
period 1
streams compute comm
strategies build reduce_dp
comm dp.grads axes dp

parameter layers.0.w f32[4,8] stage 0 normal deviation 0.02 decay tensor 0
parameter layers.0.b f32[4] stage 0 zeros tensor 1

segment layer.F
  bound %x activation f32[2,3,8] dp:S0 micro:slice
  bound %w parameter  f32[4,8]
  bound %b parameter  f32[4]
  bound %y activation f32[2,3,4] dp:S0 micro:slice

  linear.F proj (%x, %w, %b) -> (%y) bias #build

segment layer.B
  bound %x      activation f32[2,3,8] dp:S0 micro:slice
  bound %dy     activation f32[2,3,4] dp:S0 micro:slice
  bound %bucket gradient   f32[36] dp:P micro:sum
  local %dw     gradient   f32[4,8] dp:P micro:sum view %bucket
  local %db     gradient   f32[4] dp:P micro:sum view %bucket offset 32

  linear.W proj (%x, %dy) -> (%dw, %db) bias #build

segment reduce
  bound %bucket gradient f32[36] dp:P micro:sum
  local %sum    gradient f32[36] micro:sum view %bucket

  all_reduce dp (%bucket) -> (%sum) comm=dp.grads @comm #reduce_dp

role 0
  %w            parameter  f32[4,8] persistent of layers.0.w
  %b            parameter  f32[4] persistent of layers.0.b
  %x@m0         activation f32[2,3,8] dp:S0 micro:slice
  %y@m0         activation f32[2,3,4] dp:S0 micro:slice
  %bucket       gradient   f32[36] dp:P micro:sum

  alloc %x@m0
  alloc %y@m0
  call layer.F l=0 m=0 (x=%x@m0, w=%w, b=%b, y=%y@m0)
  alloc %bucket
  call layer.B l=0 m=0 (x=%x@m0, dy=%y@m0, bucket=%bucket)
  free %x@m0
  free %y@m0
  call reduce (bucket=%bucket)
  free %bucket
)";
}

namespace {

/// Numbers of one seed, one after the other.
class Dice {
 public:
  explicit Dice(uint64_t seed) : key_{seed, RandomUse::kShuffle, 0, 0} {}
  int below(int n) { return static_cast<int>(random_bits(key_, next_++) % static_cast<uint32_t>(n)); }

 private:
  RandomKey key_;
  uint64_t next_ = 0;
};

Type floats(int64_t n) {
  Type t;
  t.shape = Shape{n};
  return t;
}

/// A segment of `locals` locals, a bound buffer of 64 floats, two views on it, and `ops` copies and additions among them.
Segment random_segment(Dice& dice, int number) {
  Segment segment;
  segment.name = fmt::format("s{}", number);
  segment.slots.push_back({.name = "x", .type = floats(64), .cls = BufferClass::kActivation, .kind = SlotKind::kBound});
  segment.slots.push_back({.name = "low", .type = floats(32), .view = View{.base = 0}});
  segment.slots.push_back({.name = "high", .type = floats(48), .view = View{.base = 0, .offset = 16}});
  segment.slots.push_back(
      {.name = "shard", .type = floats(16), .view = View{.base = 0, .offset = 0, .shard_axes = AxisSet::of(1)}});
  const int first_local = static_cast<int>(segment.slots.size());
  const int locals = 1 + dice.below(4);
  for (int l = 0; l < locals; ++l)
    segment.slots.push_back({.name = fmt::format("t{}", l),
                             .type = floats(1 + dice.below(100)),
                             .cls = l % 2 ? BufferClass::kTemporary : BufferClass::kBuffer,
                             .space = l == 3 ? Space::kHost : Space::kDevice});
  std::vector<int> live, dead;
  for (int l = 0; l < locals; ++l) dead.push_back(first_local + l);
  for (int step = 0; step < 12; ++step) {
    const int choice = dice.below(4);
    if (choice == 0 && !dead.empty()) {
      segment.steps.emplace_back(AllocSlot{SlotId(dead.back())});
      live.push_back(dead.back());
      dead.pop_back();
    } else if (choice == 1 && !live.empty()) {
      segment.steps.emplace_back(FreeSlot{SlotId(live.front())});
      live.erase(live.begin());
    } else {
      const auto any = [&] {
        return SlotId(live.empty() || dice.below(2) ? dice.below(4)
                                                    : live[static_cast<size_t>(dice.below(static_cast<int>(live.size())))]);
      };
      Op op{.work = Copy{},
            .reads = {any()},
            .writes = {any()},
            .stream = StreamId(dice.below(4)),
            .label = fmt::format("op{}", step)};
      segment.steps.emplace_back(std::move(op));
    }
  }
  for (const int l : live) segment.steps.emplace_back(FreeSlot{SlotId(l)});
  return segment;
}

}  // namespace

Plan random_plan(uint64_t seed) {
  Dice dice(seed);
  Plan plan;
  plan.name = fmt::format("random{}", seed);
  plan.mesh.axes = {{"pp", 1}, {"dp", 4}};
  plan.streams = {"compute", "comm", "copy", "offload"};
  for (int s = 0; s < 3; ++s) plan.segments.push_back(random_segment(dice, s));
  Role role;
  for (int b = 0; b < 8; ++b)
    role.buffers.push_back(
        {.name = fmt::format("b{}", b), .type = floats(64), .kind = BufferClass::kActivation, .persistent = b == 0});
  role.buffers.push_back({.name = "big", .type = floats(200), .kind = BufferClass::kGradient, .persistent = true});
  role.buffers.push_back(
      {.name = "window", .type = floats(64), .kind = BufferClass::kActivation, .view = View{.base = 8, .offset = 100}});
  std::vector<int> live{0, 9}, dead{1, 2, 3, 4, 5, 6, 7};
  for (int item = 0; item < 40; ++item) {
    const int choice = dice.below(3);
    if (choice == 0 && !dead.empty()) {
      role.program.emplace_back(Alloc{BufferId(dead.back())});
      live.push_back(dead.back());
      dead.pop_back();
    } else if (choice == 1 && live.size() > 2) {
      const auto victim = static_cast<std::ptrdiff_t>(2 + dice.below(static_cast<int>(live.size()) - 2));
      role.program.emplace_back(Free{BufferId(live[static_cast<size_t>(victim)])});
      dead.insert(dead.begin(), live[static_cast<size_t>(victim)]);
      live.erase(live.begin() + victim);
    } else {
      Call call{.segment = SegmentId(dice.below(3)), .layer = item, .micro_batch = dice.below(2)};
      call.binding.resize(plan.segments[call.segment.index()].slots.size());
      call.binding[0] = BufferId(live[static_cast<size_t>(dice.below(static_cast<int>(live.size())))]);
      role.program.emplace_back(std::move(call));
    }
  }
  for (size_t i = 2; i < live.size(); ++i) role.program.emplace_back(Free{BufferId(live[i])});
  plan.roles.push_back(std::move(role));
  return plan;
}

}  // namespace shardlab::testing
