// The gate before every other library: is there a driver, and a device?
#pragma once

#include "profiler/gpu/library.h"

namespace shardlab::profiler {

/// The three calls of libcuda that tell. CUresult is an int: 0 success, 100 no device.
struct DriverCalls {
  int (*init)(unsigned flags) = nullptr;
  int (*version)(int* version) = nullptr;  ///< 13000 for 13.0
  int (*device_count)(int* count) = nullptr;
};

/// libcuda.so.1 as it is here; calls are null where there is none. The library is never closed.
DriverCalls load_driver();

/// ok, or kNoDriver with the missing part. Asked before CUPTI is touched: without a driver some of CUPTI's calls succeed
/// all the same.
LibraryStatus driver_status(const DriverCalls& driver);

}  // namespace shardlab::profiler
