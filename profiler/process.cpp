#include "profiler/process.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

namespace shardlab::profiler {

namespace {

std::optional<double> read_number(const std::string& path) {
  std::ifstream file(path);
  double value = 0;
  if (!(file >> value)) return std::nullopt;
  return value;
}

}  // namespace

int64_t proportional_memory() {
  std::ifstream file("/proc/self/smaps_rollup");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("Pss:")) return std::stoll(line.substr(4)) * 1024;  // "Pss:   123 kB"
  return 0;
}

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
  why_not_ = fmt::format(
      "there are no RAPL counters in {}: energy_j needs Linux on an Intel or AMD processor, not a virtual machine", root);
  for (const auto& entry : std::filesystem::directory_iterator(root, unreadable)) {
    const std::string folder = entry.path().filename().string(), path = entry.path().string();
    // "intel-rapl:0" is a package; "intel-rapl:0:1" one of its domains, which the package's counter includes.
    if (folder.find("rapl:") == std::string::npos || std::ranges::count(folder, ':') != 1) continue;
    // "psys" counts the whole platform, the packages with it.
    if (std::string name; std::ifstream(path + "/name") >> name && !name.starts_with("package")) continue;
    const auto range = read_number(path + "/max_energy_range_uj");
    const auto now = read_number(path + "/energy_uj");
    if (!now || !range) {
      packages_.clear();
      why_not_ = fmt::format("{0}/energy_uj may not be read: run as root, or `sudo chmod a+r {0}/energy_uj`", path);
      return;
    }
    packages_.push_back({path, *now, *range, 0});
  }
  if (!packages_.empty()) why_not_.clear();
}

bool EnergyMeter::read_all() {
  for (Package& p : packages_) {
    const auto now = read_number(p.path + "/energy_uj");
    if (!now) {
      why_not_ = fmt::format("{}/energy_uj could be read no longer", p.path);
      packages_.clear();
      return false;
    }
    p.used_uj += *now >= p.last_uj ? *now - p.last_uj : *now + p.range_uj - p.last_uj;
    p.last_uj = *now;
  }
  return !packages_.empty();
}

void EnergyMeter::restart() {
  read_all();
  for (Package& p : packages_) p.used_uj = 0;
}

std::optional<double> EnergyMeter::joules() {
  if (!read_all()) return std::nullopt;
  double total_uj = 0;
  for (const Package& p : packages_) total_uj += p.used_uj;
  return total_uj * 1e-6;
}

}  // namespace shardlab::profiler
