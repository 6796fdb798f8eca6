// The recorder behind `GpuRecorder::create`, over any source of activity records: tests give it one of their own.
#pragma once

#include <memory>

#include "profiler/gpu/activity_source.h"
#include "profiler/gpu/recorder.h"

namespace shardlab::profiler {

/// A recorder over `opened.source`, or over CUDA events where there is none. `options.source` is not looked at.
std::unique_ptr<GpuRecorder> make_gpu_recorder(int world_size, const GpuRecorderOptions& options, OpenedSource opened);

}  // namespace shardlab::profiler
