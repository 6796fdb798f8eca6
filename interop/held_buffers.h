// Storage of a rank over its step: what lives throughout, and each allocation and free in its order.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plan/memory.h"
#include "plan/program.h"
#include "plan/trace.h"

namespace shardlab::interop {

/// A buffer in device memory that owns its storage.
struct HeldBuffer {
  std::string name;       ///< "layer3.attn.wqkv"; of a local of a call its slot
  std::string_view kind;  ///< "parameter", "activation": name of its class
  int64_t offset = 0;     ///< in the arena
  int64_t bytes = 0;      ///< aligned: of all that live at once the sum is the plan's live bytes
};

struct BufferChange {
  bool freed = false;
  HeldBuffer buffer;
  double at_s = 0;    ///< from the start of the step; end of the op of stream 0 before it
  std::string where;  ///< "layers.3 m2 layer.F alloc %qkv"
  int32_t instruction = 0;
};

/// Buffers that live throughout, by offset.
std::vector<HeldBuffer> persistent_buffers(const Plan& plan, const Program& program, const ArenaLayout& arena);

/// Allocations and frees of some bytes in device memory, in the order of the program. Their times never decrease.
std::vector<BufferChange> buffer_changes(const Plan& plan, const Program& program, const ArenaLayout& arena, const Trace& trace,
                                         int rank, int step);

}  // namespace shardlab::interop
