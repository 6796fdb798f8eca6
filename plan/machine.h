// How fast: devices, nodes, links and, for a calibrated machine, measured tables. Plans never see this.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "plan/base/by_name.h"

namespace shardlab {

/// Version of machine files. Files without one are of version 1; newer ones are refused.
inline constexpr int kMachineFileVersion = 1;

/// Where a constant comes from; an answer built on a transferred one says so.
enum class Provenance : uint8_t { kDatasheet, kMeasured, kFitted, kTransferred };

/// One measured point: an op of `work` units (flops or bytes) took `seconds` (median) with relative spread (p90-p10)/median.
struct RatePoint {
  std::string kernel;          ///< kind and phase of the op: "linear.F", "norm.I", "all_reduce"
  std::vector<int64_t> shape;  ///< [m, n, k] of a matmul, [b, heads, s, d] of attention, [bytes] of a memory-bound op, [bytes,
                               ///< ranks] of a collective
  int concurrency = 1;         ///< ranks that ran the same op at the same time; 1 for communication
  double seconds = 0;
  double spread = 0;
  int repeats = 0;
};

/// What calibration measured on this very machine (simulator/interpreter/calibrate).
struct Calibration {
  std::string id;  ///< date and hash, stored with every prediction
  std::string date;
  std::string command;
  std::string processor;
  std::string kernel_variant;
  std::vector<RatePoint> points;
  double op_overhead_s = 0;   ///< dispatch of an op that does nothing
  double wake_latency_s = 0;  ///< one stream waking another
  double handover_s = 0;      ///< one stream taking over the core of another (runtime/core_scheduler.h)
  double turn_s = 0;          ///< time that a stream keeps a core which another wants, at least its op; 0: they take turns op by op
  /// Of cores that do the same at the same time: standard deviation of an op's time, relative, each core by itself. 0: not measured.
  double unsteadiness = 0;
  bool launch_ahead = false;  ///< a GPU was measured: `op_overhead_s` is the host's, which launches ops ahead of the device
};

struct Device {
  std::string id;            ///< "h100-sxm5-80gb", "local-cpu"
  std::string architecture;  ///< "hopper", "cdna3"; empty when not known
  int64_t memory_bytes = 0;  ///< that a program can use
  double memory_bytes_per_s = 0;
  ByName<double> peak_flops;    ///< dense, by precision: "fp32", "bf16", "fp8"
  double link_bytes_per_s = 0;  ///< one way, to devices of the same node
  double power_w = 0;
  /// Further constants by the names of simulator/interpreter/device_constants.h ("matmul.bf16.rate", "memory.norm"). A constant that is
  /// missing has the default that is stated there, tagged transferred.
  ByName<double> constants;
  ByName<Provenance> provenance;  ///< by the name of the constant; those of Machine::fabric as "fabric.NAME"
};

struct Machine {
  std::string id = "local";
  Device device;
  int devices_per_node = 1;
  int nodes = 1;
  double inter_bytes_per_s = 0;  ///< one way, per device, between nodes
  /// What joins devices and nodes beyond the two bandwidths, by the names of
  /// simulator/interpreter/fabric.h ("rails_per_node", "oversubscription").
  ByName<double> fabric;
  bool local = false;  ///< this machine: ranks share `cores`
  int cores = 0;
  /// Kinds of nodes of a mixed machine, in the order of ranks: ranks fill the nodes of the first kind, then the nodes of the next
  /// (plan/kinds.h). Each is a machine of one kind. Empty: all nodes are as the fields above say. On a mixed machine the fields above hold
  /// for every device (`join_kinds`), and `inter_bytes_per_s` is the bandwidth between nodes of unlike kinds.
  std::vector<Machine> kinds;
  /// Null where nobody measured; thousands of rates, shared by every case of a sweep.
  std::shared_ptr<const Calibration> calibration;

  int devices() const { return devices_per_node * nodes; }
  bool is_mixed() const { return !kinds.empty(); }
  /// Whether ranks run on cores of this machine. Otherwise each rank has a device, or shares one of the `cores` devices of a local machine.
  bool runs_on_cores() const { return local && (calibration == nullptr || !calibration->launch_ahead); }
};

}  // namespace shardlab
