// A trace as PyTorch's profiler (Kineto) writes one, which HolisticTraceAnalysis, the TensorBoard plugin and Perfetto read.
#pragma once

#include <string>
#include <vector>

#include "interop/traced.h"
#include "plan/program.h"
#include "plan/trace.h"

namespace shardlab::interop {

/// The file of one rank, with all steps of the trace laid end to end. `programs` are indexed by role.
///
/// An op is a kernel on the device of its rank, on stream 7 + its stream, as PyTorch numbers streams. Names begin with what
/// HolisticTraceAnalysis sorts by: "ncclKernel_all_reduce", "Memcpy DtoH"; every other name is compute. The kernel of a
/// communication lasts from its begin to its end, the wait for peers included, as NCCL's do. Each kernel has the launch that it
/// is correlated with, at the time when the host launched it; where the trace does not know that, at the begin of the step. Each
/// step is an annotation "ProfilerStep#N". Waits are no events: what is between kernels is idle.
///
/// Times are whole microseconds, since that program rounds fractions away from each kernel: begins and ends are rounded alike, so
/// that kernels which touch go on touching.
std::string to_kineto_json(const Plan& plan, const std::vector<Program>& programs, const Trace& trace, int rank);

}  // namespace shardlab::interop
