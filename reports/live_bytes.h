// The bytes that a rank holds over its step.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "plan/memory.h"
#include "plan/trace.h"

namespace shardlab::reports {

/// Live bytes in device memory from `at_s` on.
struct LiveBytes {
  double at_s = 0;  ///< from the start of the step
  MemoryByClass bytes;
};

/// A buffer that is there at the peak.
struct LiveItem {
  std::string name;
  BufferClass kind = BufferClass::kTemporary;
  int64_t bytes = 0;
};

struct LiveCurve {
  int rank = 0;
  int stage = 0;
  std::vector<LiveBytes> points;  ///< where the bytes change; the first at 0
  std::vector<LiveItem> items;    ///< the largest buffers at the first moment of the peak; alike ones of several layers together
  int64_t peak_bytes = 0;         ///< equal to the plan's peak
};

struct LiveOptions {
  size_t max_points = 400;  ///< of more, the highest of each stretch of time is kept, and so the peak
  size_t max_items = 12;
};

/// The fold over allocations and frees of `rank`, each placed in time by the op before it in the trace. Persistent buffers are there
/// from the start.
LiveCurve live_curve(const Plan& plan, const std::vector<Program>& programs, const Trace& trace, int rank, int step, double origin,
                     const LiveOptions& options = {});

}  // namespace shardlab::reports
