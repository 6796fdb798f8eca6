// Memory of a plan: the fold over buffer lifetimes in issue order, and the packing of an arena.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "plan/base/units.h"
#include "plan/plan.h"
#include "plan/program.h"

namespace shardlab {

/// Live bytes by class, each buffer rounded up to the alignment.
struct MemoryByClass {
  std::array<int64_t, kBufferClasses> bytes{};
  int64_t total() const;
};

/// What the fold says of one role in one space.
struct MemoryPeak {
  int64_t peak_bytes = 0;  ///< largest sum of aligned live bytes
  int64_t persistent_bytes = 0;
  MemoryByClass at_peak;        ///< what was live at the first moment of the peak
  MemoryByClass peak_by_class;  ///< each class's own largest sum
  std::string moment;           ///< the instruction at the peak, as text
};

/// Peak of each space for role `role`, without expanding the program: a segment's profile is folded once, then the calls.
std::array<MemoryPeak, kSpaces> memory_peak(const Plan& plan, int role);

/// Arena bytes a rank needs in each space: what packing makes of the peak.
struct ArenaSize {
  std::array<int64_t, kSpaces> bytes{};
};

/// Gives every storage-owning buffer of the role (Buffer::offset) and every local of its program an offset such that storage
/// that lives at the same time in issue order never overlaps. Persistent buffers come first. Deterministic.
ArenaSize place_arena(Plan& plan, Program& program);

}  // namespace shardlab
