// CUPTI as a source of activity records. Needs CUPTI's headers.
#pragma once

#include <cstdint>

#include "profiler/gpu/activity_source.h"
#include "profiler/gpu/cupti_calls.h"

namespace shardlab::profiler {

/// Subscribes and tries everything that the recorder needs, on the given calls: the library's or a test's. The calls must outlive
/// the process (CUPTI calls back from threads of its own).
OpenedSource open_cupti_on(const CuptiCalls& calls, int64_t max_records);

}  // namespace shardlab::profiler
