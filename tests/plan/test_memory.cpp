#include "plan/memory.h"

#include <fmt/format.h>

#include "plan/verify.h"
#include "tests/namespaces.h"
#include "tests/plan/plans.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

using testing::parsed;
using testing::random_plan;

struct Storage {
  int space;
  int cls;
  int64_t bytes;
};

/// What an alloc or free is about.
Storage storage_of(const Plan& plan, const Program& program, const Instruction& i) {
  if (i.local >= 0) {
    const LocalBuffer& l = program.locals[static_cast<size_t>(i.local)];
    return {static_cast<int>(l.space), static_cast<int>(l.cls), l.bytes};
  }
  const Buffer& b = plan.roles[0].buffers[i.buffer.index()];
  return {static_cast<int>(b.space), static_cast<int>(b.kind), aligned(b.type.bytes())};
}

/// Where `place_arena` put what an alloc or free is about.
int64_t& offset_of(ArenaLayout& layout, const Instruction& i) {
  return i.local >= 0 ? layout.locals[static_cast<size_t>(i.local)] : layout.buffers[i.buffer.index()];
}

/// The fold as its definition says it, instruction by instruction.
std::array<MemoryPeak, kSpaces> naive_peak(const Plan& plan, const Program& program) {
  std::array<MemoryPeak, kSpaces> peaks;
  std::array<MemoryByClass, kSpaces> live;
  const auto change = [&](const Storage& s, int sign, const std::string& moment) {
    MemoryPeak& peak = peaks[static_cast<size_t>(s.space)];
    MemoryByClass& now = live[static_cast<size_t>(s.space)];
    now.bytes[static_cast<size_t>(s.cls)] += sign * s.bytes;
    for (size_t c = 0; c < kBufferClasses; ++c) peak.peak_by_class.bytes[c] = std::max(peak.peak_by_class.bytes[c], now.bytes[c]);
    if (now.total() <= peak.peak_bytes) return;
    peak.peak_bytes = now.total();
    peak.at_peak = now;
    peak.moment = moment;
  };
  for (MemoryPeak& p : peaks) p.moment = "the start of the step";
  for (const Buffer& b : plan.roles[0].buffers)
    if (b.persistent && !b.view) {
      change({static_cast<int>(b.space), static_cast<int>(b.kind), aligned(b.type.bytes())}, 1, "the start of the step");
      peaks[static_cast<size_t>(b.space)].persistent_bytes += aligned(b.type.bytes());
    }
  for (const Instruction& i : program.instructions)
    if (i.kind != Instruction::Kind::kRun)
      change(storage_of(plan, program, i), i.kind == Instruction::Kind::kAlloc ? 1 : -1, describe(plan, i));
  return peaks;
}

TEST_CASE("the peak folded from profiles equals the fold over the expanded program") {
  int after_start = 0;
  for (uint64_t seed = 0; seed < 200; ++seed) {
    const Plan plan = random_plan(seed);
    const auto folded = memory_peak(plan, 0);
    const auto naive = naive_peak(plan, expand_program(plan, 0));
    for (size_t s = 0; s < kSpaces; ++s) {
      REQUIRE(folded[s].peak_bytes == naive[s].peak_bytes);
      REQUIRE(folded[s].persistent_bytes == naive[s].persistent_bytes);
      REQUIRE(folded[s].at_peak.bytes == naive[s].at_peak.bytes);
      REQUIRE(folded[s].peak_by_class.bytes == naive[s].peak_by_class.bytes);
      REQUIRE(folded[s].moment == naive[s].moment);
    }
    after_start += folded[0].peak_bytes > folded[0].persistent_bytes;
  }
  REQUIRE(after_start == 200);
}

//  bytes   w 128 (persistent), x 128, local t 64 in each call: 128, 256, 320, 256, 320 ...
TEST_CASE("a hand-made peak, to the byte, with its moment and classes") {
  const Plan plan = parsed(R"(shardlab plan 1
mesh dp=2
streams compute
segment s
  bound %x activation f32[32]
  local %t temporary f32[3]
  alloc %t
  copy c (%x) -> (%t)
  free %t
role 0
  %w parameter f32[32] persistent
  %half parameter f32[16] persistent view %w
  %x activation f32[32]
  %h buffer f32[1] host
  alloc %h
  alloc %x
  call s l=7 (x=%x)
  call s l=8 (x=%x)
  free %x
  free %h
)");
  const auto peaks = memory_peak(plan, 0);
  REQUIRE(peaks[0].peak_bytes == 320);
  REQUIRE(peaks[0].persistent_bytes == 128);
  REQUIRE(peaks[0].moment == "layers.7 s alloc %t");
  REQUIRE(peaks[0].at_peak.bytes[static_cast<size_t>(BufferClass::kParameter)] == 128);
  REQUIRE(peaks[0].at_peak.bytes[static_cast<size_t>(BufferClass::kActivation)] == 128);
  REQUIRE(peaks[0].at_peak.bytes[static_cast<size_t>(BufferClass::kTemporary)] == 64);
  REQUIRE(peaks[1].peak_bytes == 64);
  REQUIRE(peaks[1].moment == "alloc %h");
  REQUIRE(peaks[2].peak_bytes == 0);
  REQUIRE(peaks[2].moment == "the start of the step");
}

TEST_CASE("in the arena nothing that lives overlaps, on random plans, and no packing is below the peak") {
  int64_t arena_bytes = 0, peak_bytes = 0;
  for (uint64_t seed = 0; seed < 100; ++seed) {
    const Plan plan = random_plan(seed);
    const Program program = expand_program(plan, 0);
    const ArenaLayout arena = place_arena(plan, program);
    const auto faults = find_overlaps(plan, program, arena);
    INFO((faults.empty() ? "" : faults.front().op + ": " + faults.front().message));
    REQUIRE(faults.empty());
    const auto peaks = memory_peak(plan, 0);
    for (size_t s = 0; s < kSpaces; ++s) REQUIRE(arena.bytes[s] >= peaks[s].peak_bytes);
    arena_bytes += arena.bytes[0];
    peak_bytes += peaks[0].peak_bytes;
    const ArenaLayout again = place_arena(plan, program);
    REQUIRE(again.bytes == arena.bytes);
    REQUIRE(again.buffers == arena.buffers);
    REQUIRE(again.locals == arena.locals);
  }
  REQUIRE(arena_bytes * 100 <= peak_bytes * 103);
}

TEST_CASE("an arena in which anything lies on what lives, off its grain or outside is found") {
  int moved = 0;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const Plan plan = random_plan(seed);
    const Program program = expand_program(plan, 0);
    const ArenaLayout good = place_arena(plan, program);
    const auto found = [&](const Instruction& i, int64_t offset) {
      ArenaLayout bad = good;
      offset_of(bad, i) = offset;
      return !find_overlaps(plan, program, bad).empty();
    };
    std::vector<const Instruction*> live;
    for (const Instruction& i : program.instructions) {
      if (i.kind == Instruction::Kind::kRun) continue;
      const Storage s = storage_of(plan, program, i);
      if (s.bytes == 0) continue;
      const auto same = [&](const Instruction* o) { return o->local == i.local && o->buffer == i.buffer; };
      if (i.kind == Instruction::Kind::kFree) {
        std::erase_if(live, same);
        continue;
      }
      ArenaLayout at = good;
      const int64_t past = good.bytes[static_cast<size_t>(s.space)] - grains(static_cast<Space>(s.space), s.bytes);
      REQUIRE(found(i, offset_of(at, i) + 1));
      REQUIRE(found(i, -grain(static_cast<Space>(s.space))));
      REQUIRE(found(i, past + grain(static_cast<Space>(s.space))));
      for (const Instruction* o : live) {
        if (storage_of(plan, program, *o).space != s.space) continue;
        REQUIRE(found(i, offset_of(at, *o)));
        ++moved;
      }
      live.push_back(&i);
    }
  }
  REQUIRE(moved > 1000);
}

TEST_CASE("persistent buffers come first, each space is its own arena") {
  Plan plan = parsed(R"(shardlab plan 1
mesh dp=2
streams compute
role 0
  %x activation f32[16]
  %w parameter f32[17] persistent
  %v parameter f32[16] persistent
  %h moment f32[16] host persistent
  %g buffer f32[16] host
  alloc %x
  alloc %g
  free %g
  free %x
)");
  const Program program = expand_program(plan, 0);
  const ArenaLayout arena = place_arena(plan, program);
  REQUIRE(arena.buffers == std::vector<int64_t>{192, 0, 128, 0, 4096});  // outside the device by blocks of a drive
  REQUIRE(arena.bytes == std::array<int64_t, kSpaces>{256, 8192, 0});
}

}  // namespace
}  // namespace shardlab::testing
