// Traces on disk.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plan/program.h"
#include "plan/trace.h"

namespace shardlab::profiler {

/// The identity of a plan in a trace: a hash of the plan's text, 16 hex digits. plan.txt beside the trace has the same hash.
std::string plan_digest(std::string_view text);

/// Writes the Chrome trace-event form (open in Perfetto, which reads it packed) to `path`, through a temporary file beside it. A
/// path that ends in ".gz" is packed by zlib. Returns the bytes of the file. Throws WorldError when the file cannot be written.
int64_t write_chrome_trace(const std::string& path, const Plan& plan, const std::vector<Program>& programs, const Trace& trace);

/// Writes one JSON object a line: first {"version", "producer", "plan", "world_size", "steps", "events", "streams",
/// "dropped", "recorder_overhead_s"} and, of a device's trace, "accounting" with the fields of `TraceAccounting`, then one a
/// step and rank {"step", "rank", "begin", "end"}, then one an event {"kind", "rank", "instruction", "op", "stream", "step",
/// "begin", "end", "peer_wait", "sent_bytes"} and "queued" of device work. "plan" is the digest of the plan's text, "events"
/// the number of lines to come, by which a reader knows a file that was cut off. Seconds, full precision. Packed and
/// returning as above. Throws WorldError.
int64_t write_trace_lines(const std::string& path, const Plan& plan, const std::vector<Program>& programs, const Trace& trace);

}  // namespace shardlab::profiler
