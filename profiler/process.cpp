#include "profiler/process.h"

#include <algorithm>
#include <filesystem>
#include <fstream>

namespace shardlab {

namespace {

std::optional<double> read_number(const std::string& path) {
  std::ifstream file(path);
  double value = 0;
  if (!(file >> value)) return std::nullopt;
  return value;
}

}  // namespace

ResidentMemory resident_memory() {
  ResidentMemory memory;
  std::ifstream status("/proc/self/status");
  for (std::string key; status >> key;) {
    int64_t kib = 0;
    if (key == "VmRSS:" && status >> kib) memory.now_bytes = kib * 1024;
    if (key == "VmHWM:" && status >> kib) memory.peak_bytes = kib * 1024;
  }
  return memory;
}

EnergyMeter::EnergyMeter(std::string root) {
  std::error_code unreadable;
  for (const auto& entry : std::filesystem::directory_iterator(root, unreadable)) {
    const std::string name = entry.path().filename().string();
    // "intel-rapl:0" is a package; "intel-rapl:0:1" one of its domains, which the package's counter includes.
    if (name.find("rapl:") == std::string::npos || std::ranges::count(name, ':') != 1) continue;
    const auto range = read_number(entry.path().string() + "/max_energy_range_uj");
    const auto now = read_number(entry.path().string() + "/energy_uj");
    if (!now || !range) {
      readable_ = false;
      continue;
    }
    packages_.push_back({entry.path().string(), *now, *range, 0});
  }
}

std::optional<double> EnergyMeter::joules() {
  if (!readable_ || packages_.empty()) return std::nullopt;
  double total_uj = 0;
  for (Package& p : packages_) {
    const auto now = read_number(p.path + "/energy_uj");
    if (!now) return std::nullopt;
    p.used_uj += *now >= p.last_uj ? *now - p.last_uj : *now + p.range_uj - p.last_uj;
    p.last_uj = *now;
    total_uj += p.used_uj;
  }
  return total_uj * 1e-6;
}

}  // namespace shardlab
