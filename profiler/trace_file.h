// Traces on disk.
#pragma once

#include <string>
#include <vector>

#include "plan/program.h"
#include "plan/trace.h"

namespace shardlab::profiler {

/// Writes the Chrome trace-event form (open in Perfetto) to `path`, through a temporary file beside it. Throws WorldError when the
/// file cannot be written.
void write_chrome_trace(const std::string& path, const Plan& plan, const std::vector<Program>& programs, const Trace& trace);

/// Writes one JSON object a line: first {"version", "producer", "world_size", "steps", "streams", "dropped",
/// "recorder_overhead_s"} and, of a device's trace, "accounting" with the fields of `TraceAccounting`, then one a step and rank
/// {"step", "rank", "begin", "end"}, then one an event {"kind", "rank", "instruction", "op", "stream", "step", "begin", "end",
/// "peer_wait", "sent_bytes"} and "queued" of device work. Seconds, full precision. Throws WorldError.
void write_trace_lines(const std::string& path, const Plan& plan, const std::vector<Program>& programs, const Trace& trace);

}  // namespace shardlab::profiler
