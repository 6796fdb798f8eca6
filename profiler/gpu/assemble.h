// Makes one trace of the records of device, driver and host. Pure functions: they need no device.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "plan/device_tracer.h"
#include "plan/program.h"
#include "plan/trace.h"
#include "profiler/gpu/activity.h"
#include "profiler/gpu/clock.h"

namespace shardlab::profiler {

/// The host's side of the steps that were kept. Times are seconds on the session's clock.
struct HostSide {
  struct Step {
    int32_t number = 0;  ///< the session's
    double begin = 0;
    double reference_error_s = 0;                 ///< of the device's reference event
    std::vector<std::array<double, 2>> interval;  ///< by rank, seconds from `begin`
  };
  struct Launch {
    OpKey op;
    double time = 0;  ///< when the host began to launch it
  };
  struct Carried {
    OpKey op;
    OpKey by;
    double time = 0;  ///< when the rank of `op` had arrived
  };
  struct Sent {
    OpKey op;
    int64_t bytes = 0;
  };
  int world_size = 0;
  std::vector<Step> steps;  ///< by number
  std::vector<Launch> launches;
  std::vector<Carried> carried;
  std::vector<Sent> sent;
};

/// When the device worked for an op, seconds on the session's clock: the hull of its kernels, copies and fills.
struct OpInterval {
  OpKey op;
  double begin = 0;
  double end = 0;
};

/// The result of `correlate` for a device's records.
struct Correlated {
  std::vector<OpInterval> ops;  ///< in order of OpKey
  TraceAccounting accounting;
  std::vector<std::string> lanes, names;
  std::vector<TraceDetail> details;
};

/// Finds the op of every record by the external ids of the host calls, never by a name. A record without an op that lies within a
/// step is `unclaimed`; one outside every step, or of an op of another step than that in which it began, `out_of_range`. A call of
/// the driver within one of the runtime, on the same thread, is no launch of its own.
Correlated correlate(const Plan& plan, const std::vector<Program>& programs, const HostSide& host, const ActivityLog& log,
                     const ClockAlignment& clock);

/// Puts the trace together: device intervals of the ops begun and carried; launch times; sent bytes; waits from the plan's edges;
/// the peers' waits of collectives and messages from the begins of both sides. Steps are numbered from the first one kept; one ends
/// on a rank when the host says so or its last op has ended, whichever is later.
Trace assemble(const Plan& plan, const std::vector<Program>& programs, const HostSide& host, const std::vector<OpInterval>& ops,
               TraceAccounting accounting);

/// The wait of each op of `events` for its dependencies: from the end of the op before it on its stream, or the step's begin, to
/// the end of the last op that it depends on, and never past its own begin. `events`: ops of one rank and step; appends to `out`.
void derive_waits(const Program& program, const std::vector<TraceEvent>& events, double step_begin, std::vector<TraceEvent>& out);

/// Sets `peer_wait` of collectives, sends and receives: the time from an op's begin to the begin of the last of its peers. Peers
/// are matched by their order on the communicator. `trace.events` are grouped by rank.
void set_peer_waits(const Plan& plan, const std::vector<Program>& programs, Trace& trace);

}  // namespace shardlab::profiler
