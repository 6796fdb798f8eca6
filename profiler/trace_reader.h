// Traces read back from disk.
#pragma once

#include <string>

#include "plan/base/result.h"
#include "plan/trace.h"

namespace shardlab::profiler {

/// Reads what `write_trace_lines` wrote. Refuses a file that is missing, of a newer version, or cut off within a line, naming the
/// line.
Result<Trace> read_trace_lines(const std::string& path);

}  // namespace shardlab::profiler
