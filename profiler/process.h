// What the operating system says of this process and of the energy that the processor used.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace shardlab::profiler {

/// Memory of this process in RAM. Zero where the system does not say.
struct ResidentMemory {
  int64_t now_bytes = 0;
  int64_t peak_bytes = 0;  ///< since the process began
};
ResidentMemory resident_memory();
/// Bytes in RAM of which this process has its part: a page that n processes have counts an n-th. 0 where the system does not say.
int64_t proportional_memory();

/// Energy of all processor packages, from Linux's powercap (RAPL) counters.
class EnergyMeter {
 public:
  /// `root`: the folder of the counters.
  explicit EnergyMeter(std::string root = "/sys/class/powercap");

  /// Counts from now on.
  void restart();
  /// Joules since the meter was made or last restarted; nothing where `why_not` says why. A counter that wrapped once is put right;
  /// call at least every few minutes.
  std::optional<double> joules();

  /// Why there are no joules (often: a virtual machine, or counters that only root may read), with what to do; empty where there
  /// are.
  const std::string& why_not() const { return why_not_; }

 private:
  struct Package {
    std::string path;
    double last_uj = 0, range_uj = 0, used_uj = 0;
  };
  bool read_all();

  std::vector<Package> packages_;
  std::string why_not_;
};

}  // namespace shardlab::profiler
