// A trace in Perfetto's own form (protocol buffers), which ui.perfetto.dev and trace_processor read.
#pragma once

#include "interop/traced.h"
#include "plan/memory.h"
#include "plan/program.h"
#include "plan/trace.h"

namespace shardlab::interop {

/// All ranks that the trace has, with all its steps laid end to end. `programs` and `arenas` are indexed by role. Bytes go to `sink` as
/// they are made.
///
/// A rank is a process: its steps lie on the track of the process, its streams are threads, and what it holds of device memory is a
/// counter in bytes, which reaches the plan's peak. An op is a slice whose name is the same for every layer and micro-batch; layer,
/// micro-batch, step, instruction and sent bytes are its arguments. The wait for peers is a slice within the op. Slices that overlap on
/// a stream, as a device's records may, go to further threads of that name. Times are whole nanoseconds; begins and ends are rounded
/// alike, so that what touches goes on touching. Details of a device's records lie below the streams.
void write_perfetto(const Plan& plan, const std::vector<Program>& programs, const std::vector<ArenaLayout>& arenas,
                    const Trace& trace, const ByteSink& sink);

}  // namespace shardlab::interop
