// What a device and its driver say they did, in structs of our own: no layout of a library's records goes further than the decoder.
// Times are nanoseconds on the tracer's clock.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "plan/base/result.h"

namespace shardlab::profiler {

/// Each distinct text once; records keep its number.
class NameTable {
 public:
  int32_t number(std::string_view name);
  const std::string& text(int32_t number) const { return names_.at(static_cast<size_t>(number)); }
  const std::vector<std::string>& all() const { return names_; }

 private:
  std::vector<std::string> names_;
  std::unordered_map<std::string, int32_t> numbers_;
};

/// A kernel, copy or fill that ran on the device.
struct DeviceWork {
  enum class Kind : uint8_t { kKernel, kCopy, kFill } kind = Kind::kKernel;
  int64_t begin_ns = 0, end_ns = 0;  ///< both 0: the driver lost them
  uint32_t correlation = 0;          ///< of the host call that launched it
  uint32_t device = 0, context = 0, stream = 0;
  int32_t name = -1;  ///< the kernel's mangled name, "copy host to device", "fill"
  int64_t bytes = 0;  ///< of a copy or fill
  std::array<int32_t, 3> grid{}, block{};
  int32_t registers = 0;     ///< a thread
  int32_t shared_bytes = 0;  ///< a block, static and dynamic

  bool has_times() const { return begin_ns != 0 && end_ns >= begin_ns; }
};

/// A call of the host into the CUDA runtime or driver.
struct HostCall {
  int64_t begin_ns = 0, end_ns = 0;
  uint32_t correlation = 0;
  uint32_t thread = 0;
  int32_t name = -1;
};

/// Memory taken from or given back to the driver, by whomever.
struct AllocationRecord {
  enum class Space : uint8_t { kDevice, kPinned, kManaged, kPageable, kOther } space = Space::kDevice;
  bool release = false;
  int64_t time_ns = 0;
  uint64_t address = 0;
  int64_t bytes = 0;
  uint32_t device = 0;
};

/// The host waited for the device, or a stream for an event.
struct SynchronisationRecord {
  int64_t begin_ns = 0, end_ns = 0;
  uint32_t correlation = 0;
  uint32_t stream = 0;  ///< no_stream where it is of a whole context
  int32_t name = -1;    ///< "event synchronize", "stream wait event", "stream synchronize", "context synchronize"
  static constexpr uint32_t kNoStream = 0xffffffff;
};

/// What tracing, module loading or the driver's own work cost.
struct OverheadRecord {
  int64_t begin_ns = 0, end_ns = 0;
  int32_t name = -1;  ///< "buffer flush", "instrumentation", "lazy function loading", ...
};

/// The host call with this correlation was made while this id was pushed on its thread.
struct ExternalLink {
  uint32_t correlation = 0;
  uint64_t id = 0;
};

/// Everything decoded, in the order of decoding.
struct ActivityLog {
  NameTable names;
  std::vector<DeviceWork> work;
  std::vector<HostCall> calls;
  std::vector<AllocationRecord> allocations;
  std::vector<SynchronisationRecord> synchronisations;
  std::vector<OverheadRecord> overheads;
  std::vector<ExternalLink> links;
  int64_t dropped = 0;     ///< by the tracer, for want of buffers, or by us beyond the limit
  int64_t unknown = 0;     ///< records of kinds that were not asked for
  int64_t unreadable = 0;  ///< buffers whose rest could not be walked

  int64_t records() const {
    return static_cast<int64_t>(work.size() + calls.size() + allocations.size() + synchronisations.size() + overheads.size() +
                                links.size());
  }
};

/// Does a call of this name hand a kernel, copy or fill to the device? Names as CUPTI gives them: "cudaLaunchKernel_v7000",
/// "cuMemcpyDtoHAsync_v2", "cudaMemsetAsync_ptsz_v7000". Graph launches hand over many and are not counted.
bool hands_work_over(std::string_view call);

/// Peak bytes taken from the driver at any time, by space in the order of AllocationRecord::Space: what cuBLAS, NCCL and the CUDA
/// context take beside the arenas shows here. Releases of what was allocated before the log count as nothing.
std::array<int64_t, 5> peak_allocated(const std::vector<AllocationRecord>& allocations);

/// The log as JSON, one record a line: a recorded run becomes a test that needs no device.
std::string to_lines(const ActivityLog& log);
/// Reads what `to_lines` wrote; refuses the first line that it cannot, by number.
Result<ActivityLog> parse_activity_lines(const std::string& text);

}  // namespace shardlab::profiler
