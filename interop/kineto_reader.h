// A trace that PyTorch's profiler (Kineto) wrote: seconds of a device by what it was busy with, to hold a prediction against.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "plan/base/result.h"
#include "plan/program.h"
#include "plan/trace.h"

namespace shardlab::interop {

/// What a kernel does, as its name and NCCL's arguments tell. NCCL sends all-to-alls as messages, so both are one class.
enum class KernelClass : uint8_t {
  kCompute,
  kAllReduce,
  kAllGather,
  kReduceScatter,
  kBroadcast,
  kMessages,
  kOtherCollective,
  kCopy
};
inline constexpr size_t kKernelClasses = 8;
std::string_view name_of(KernelClass c);

/// One interval on a device. Seconds from the first record on.
struct DeviceInterval {
  KernelClass kind = KernelClass::kCompute;
  double begin = 0, end = 0;
};

/// The device records of one rank.
struct DeviceRecords {
  int rank = -1;  ///< -1: the file does not say
  int world_size = 0;
  std::vector<std::array<double, 2>> steps;  ///< begin and end, by their begin; one of the whole file where it marks none
  std::vector<DeviceInterval> intervals;
};

/// Reads the JSON that `torch.profiler` exports: kernels, copies and fills of devices, steps by their annotations "ProfilerStep#N".
/// Refuses what is no such file, what has no device records, and records of several devices.
Result<DeviceRecords> parse_kineto(std::string_view json, const std::string& path);

/// The records that a trace of ours would leave: each op is a kernel.
DeviceRecords records_of(const Plan& plan, const std::vector<Program>& programs, const Trace& trace, int rank);

/// Mean seconds of a step by class: unions of intervals, clipped to the steps. A class's seconds may overlap another's.
struct BusySeconds {
  std::array<double, kKernelClasses> by_class{};
  double step = 0, communication = 0;
  double exposed = 0;  ///< communication with no compute beside it
  double idle = 0;     ///< nothing ran
};
BusySeconds busy_seconds(const DeviceRecords& records);

}  // namespace shardlab::interop
