// Traces read back from disk.
#pragma once

#include <istream>
#include <string>

#include "plan/base/result.h"
#include "plan/trace.h"

namespace shardlab::profiler {

/// Reads what `write_trace_lines` wrote. Refuses a file that is missing, of a newer version, or cut off within a line, naming the
/// line.
Result<Trace> read_trace_lines(const std::string& path);

/// The same from a stream; `path` stands in messages. Ranks, steps and streams of every line are those of the first, and what the
/// first line promises is bounded (plan/base/limits.h) before there is room for it.
Result<Trace> read_trace_lines(std::istream& lines, const std::string& path);

}  // namespace shardlab::profiler
