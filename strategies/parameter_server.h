#pragma once

#include "plan/base/units.h"

namespace shardlab {
struct Case;
}

namespace shardlab::strategies {
struct Draft;

/// See parameter_server.cpp.
void parameter_server(Draft& draft);

/// The stream of updates: the servers' own where workers run apart, else the compute stream.
StreamId update_stream(Draft& draft);

}  // namespace shardlab::strategies
