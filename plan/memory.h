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

/// The memory of one role in one space, as the fold over the plan gives it.
struct MemoryPeak {
  int64_t peak_bytes = 0;  ///< largest sum of aligned live bytes
  int64_t persistent_bytes = 0;
  MemoryByClass at_peak;        ///< what was live at the first moment of the peak
  MemoryByClass peak_by_class;  ///< each class's own largest sum
  std::string moment;           ///< the instruction at the peak, as text
};

/// Peak of each space for role `role`, without expanding the program: a segment's profile is folded once, then the calls.
std::array<MemoryPeak, kSpaces> memory_peak(const Plan& plan, int role);

/// Offsets and sizes of storage are multiples of this many bytes. Outside the device it is the block of a drive, so that a buffer
/// travels between host memory and a file without a copy.
constexpr int64_t grain(Space space) { return space == Space::kDevice ? kAlignment : 4096; }
constexpr int64_t grains(Space space, int64_t bytes) { return (bytes + grain(space) - 1) / grain(space) * grain(space); }

/// Whether a step reads values from the buffer that the step before left: state, and tables that are filled once. Metrics and workspaces are
/// written anew in each step.
bool outlives_steps(const Buffer& buffer);

/// Where the storage of one role lies, each space an arena of its own.
struct ArenaLayout {
  std::vector<int64_t> buffers;          ///< by BufferId: byte offset of a buffer that owns storage, -1 of a view
  std::vector<int64_t> locals;           ///< by index in Program::locals: byte offset
  std::array<int64_t, kSpaces> bytes{};  ///< size of each arena: the peak and what packing loses
};

/// Packs the role's storage: buffers that live at the same time in issue order never overlap, which `find_overlaps` proves of the
/// result. Persistent buffers come first, those that outlive steps before the others. Deterministic.
ArenaLayout place_arena(const Plan& plan, const Program& program);

}  // namespace shardlab
