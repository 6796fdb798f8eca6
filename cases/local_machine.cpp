#include "cases/local_machine.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cases/environment.h"
#include "kernels/kernels.h"
#include "plan/base/files.h"
#include "runtime/cuda/api.h"
#include "simulator/interpreter/calibrate.h"
#include "sweeps/machines.h"

namespace shardlab::cases {

std::string default_machine_file() {
  const char* configured = std::getenv("XDG_CONFIG_HOME");
  if (configured != nullptr && *configured != '\0') return std::string(configured) + "/shardlab/machine.yaml";
  const char* home = std::getenv("HOME");
  return std::string(home != nullptr ? home : ".") + "/.config/shardlab/machine.yaml";
}

std::vector<std::string> local_machine_files(const std::string& named, const std::string& case_file) {
  if (!named.empty()) return {named};
  std::vector<std::string> files;
  if (!case_file.empty()) {  // RUN/CASE/case.yaml
    const std::filesystem::path run = std::filesystem::absolute(case_file).lexically_normal().parent_path().parent_path();
    if (is_there(run / "results.sqlite")) files.push_back((run / "machine.yaml").string());
  }
  files.emplace_back("runs/local.yaml");
  files.push_back(default_machine_file());
  return files;
}

namespace {

/// What is wrong with a calibration here, or empty.
std::string fault_of(const Machine& machine, const std::string& path) {
  const Calibration& c = *machine.calibration;
  const std::string kernels = description(kernels::kernels_for_this_processor());
  if (c.processor != processor_name() || c.kernel_variant != kernels)
    return fmt::format("{} was calibrated on {} with {}; this is {} with {}", path, c.processor, c.kernel_variant, processor_name(),
                       kernels);
  if (machine.cores != usable_cores())
    return fmt::format("{} was calibrated with {} cores; this process may use {}", path, machine.cores, usable_cores());
  const std::vector<std::string> missing = simulator::kernels_not_measured(c);
  if (missing.empty()) return {};
  constexpr size_t kNamed = 4;
  const std::span named(missing.data(), std::min(kNamed, missing.size()));
  return fmt::format("{} has no measurement of {}{}: such ops are predicted by their bytes and flops alone, and mostly too fast",
                     path, fmt::join(named, ", "),
                     missing.size() > kNamed ? fmt::format(" and {} more kernels", missing.size() - kNamed) : "");
}

}  // namespace

Result<Machine> load_local_machine(const std::string& path) {
  auto machine = load_machine(path);
  if (!machine.ok() || !machine->calibration) return machine;
  if (machine->calibration->kernel_variant.starts_with("cuda ")) return machine;  // a GPU's file: `doctor` says which one is here
  static std::set<std::string> said;                                              // a verb may read the file twice
  if (const std::string fault = fault_of(*machine, path); !fault.empty() && said.insert(fault).second)
    fmt::print(stderr, "warning: {}. Run `shardlab calibrate` again.\n", fault);
  return machine;
}

namespace {

/// This machine by what the system says of it: enough to plan, to fit and to measure. Where there are GPUs a rank's memory may be
/// theirs or the processor's, which the case says and not the machine: then it is not known, and nothing is refused for it.
Machine uncalibrated_machine() {
  Machine m;
  m.local = true;
  m.cores = m.devices_per_node = usable_cores();
  m.device.id = "local-cpu";
  m.device.memory_bytes = cuda::presence().usable() ? 0 : total_memory() / m.cores;
  return m;
}

}  // namespace

Result<Machine> find_local_machine(const std::string& named, const std::string& case_file) {
  if (!named.empty()) {
    if (is_there(named)) return load_local_machine(named);
    return Error{ExitCode::kUsage,
                 fmt::format("--machine-file {}: there is no such file", named),
                 fmt::format("write it with `shardlab calibrate -o {}` (about a minute)", named),
                 {}};
  }
  for (const std::string& file : local_machine_files(named, case_file)) {
    if (!is_there(file)) continue;
    auto machine = load_local_machine(file);
    if (machine.ok() && !machine->calibration) continue;  // of a run that only measured
    if (machine.ok()) fmt::print(stderr, "this machine as {} has it: calibrated {}\n", file, machine->calibration->date);
    return machine;
  }
  return uncalibrated_machine();
}

Result<void> check_calibrated(const Machine& machine, const std::string& what) {
  if (!machine.local || machine.calibration) return {};
  return Error{ExitCode::kUsage,
               fmt::format("this machine is not calibrated, and {} needs its speed", what),
               fmt::format("run `shardlab calibrate` (about a minute), or name a machine file with --machine-file; looked for: {}",
                           fmt::join(local_machine_files(""), ", ")),
               {}};
}

LoadOptions load_options(const std::string& machine_file, std::vector<std::string> overrides, const std::string& case_file) {
  LoadOptions options;
  options.overrides = std::move(overrides);
  options.local_machine = [machine_file, case_file] { return find_local_machine(machine_file, case_file); };
  return options;
}

}  // namespace shardlab::cases
