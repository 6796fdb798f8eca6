// CUPTI's records into our own. Needs CUPTI's headers but no driver: its walk over a buffer works without.
#pragma once

#include <cstddef>
#include <cstdint>

#include "profiler/gpu/activity.h"
#include "profiler/gpu/cupti_calls.h"

namespace shardlab::profiler {

/// Copies the records of one buffer into `log`; nothing in `log` points into the buffer or the library afterwards. Of external
/// correlation only CUSTOM0 is ours. Kinds that were not asked for count as unknown, a buffer that cannot be walked to its end as
/// unreadable. Records beyond `max_records` in `log` are dropped and counted.
void decode_cupti_buffer(const CuptiCalls& calls, uint8_t* buffer, size_t valid_bytes, int64_t max_records, ActivityLog& log);

}  // namespace shardlab::profiler
