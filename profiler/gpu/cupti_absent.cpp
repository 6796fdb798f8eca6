// Stands in for CUPTI's source in builds without its headers.
#include "profiler/gpu/activity_source.h"
#include "profiler/gpu/driver.h"

namespace shardlab::profiler {

OpenedSource open_cupti(int64_t) {
  if (LibraryStatus driver = driver_status(load_driver()); !driver.ok()) return {nullptr, std::move(driver)};
  return {nullptr,
          {LibraryState::kAbsent, "this build was made without CUPTI's headers",
           "install CUDA 13's toolkit with CUPTI and build again; until then CUDA events time the ops"}};
}

}  // namespace shardlab::profiler
