// The memory of a rank over its step as PyTorch's allocator writes it, for pytorch.org/memory_viz and torch.cuda._memory_viz.
#pragma once

#include <string>

#include "plan/memory.h"
#include "plan/program.h"
#include "plan/trace.h"

namespace shardlab::interop {

/// The pickle of a snapshot with one device, the rank: {"segments", "device_traces", "allocator_settings", "external_annotations"}.
///
/// The arena is one segment, and addresses are offsets in it, so that the viewer shows how buffers are packed. Buffers that live
/// throughout are its active blocks; every other one is an "alloc" and a "free_requested" with its "free_completed", for each step of
/// the trace, in the order of the program. Sizes are aligned ones: active bytes reach the plan's peak. The one frame of an event names
/// the buffer, its class, and the instruction. "time_us" counts from the begin of the first step.
///
/// Opcodes are of pickle's protocol 2, those that the viewer's reader knows (torch/utils/viz/MemoryViz.js at v2.7).
std::string to_memory_snapshot(const Plan& plan, const Program& program, const ArenaLayout& arena, const Trace& trace, int rank);

}  // namespace shardlab::interop
