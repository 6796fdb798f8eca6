// doctor: what of this machine the program can use, and what to do about the rest.
#include <dlfcn.h>
#include <fmt/format.h>

#include <filesystem>

#include "cli/common.h"
#include "cli/environment.h"
#include "cli/verbs.h"
#include "kernels/kernels.h"
#include "profiler/process.h"
#include "reports/format.h"

namespace shardlab {
namespace {

struct Check {
  std::string what, state, remedy;
};

std::string variants() {
  std::string text;
  for (const Kernels* k : all_variants())
    if (runs_here(*k)) text += fmt::format("{}{}", text.empty() ? "" : ", ", k->name);
  return text;
}

/// A library that is only looked for: nothing of it is called.
Check library(const char* what, const char* file, const char* remedy) {
  void* handle = dlopen(file, RTLD_LAZY | RTLD_LOCAL);
  if (handle == nullptr) return {what, "not found", remedy};
  dlclose(handle);
  return {what, "found", ""};
}

Check calibration() {
  const std::string path = default_machine_file();
  if (!std::filesystem::exists(path)) return {"calibration", "none", "run `shardlab calibrate` (about a minute)"};
  const auto machine = load_local_machine(path);
  if (!machine.ok()) return {"calibration", "unreadable: " + machine.error().message, "run `shardlab calibrate` again"};
  return {"calibration",
          machine->calibration ? fmt::format("{} of {}", machine->calibration->id, machine->calibration->date) : "none in " + path,
          ""};
}

Result<ExitCode> doctor(const std::string& format_name) {
  const auto format = parse_format(format_name);
  if (!format.ok()) return format.error();
  EnergyMeter energy;
  const bool readable = energy.joules().has_value();
  const std::vector<Check> checks{
      {"program", version_line(), ""},
      {"processor", fmt::format("{}, {} cores", processor_name(), usable_cores()), ""},
      {"memory", bytes_text(usable_memory()) + " available", ""},
      {"kernels", variants(), ""},
      {"matrix library", description(kernels_for_this_processor()), ""},
      calibration(),
      {"energy counters", readable ? "readable" : "not readable", energy.why_not()},
      library("CUDA driver", "libcuda.so.1", "only needed for `--backend cuda`, which this version does not have"),
      library("CUPTI", "libcupti.so", "only needed to trace GPUs"),
      library("NCCL", "libnccl.so.2", "only needed to train on several GPUs"),
  };
  Table table{{{"what"}, {"state"}, {"remedy"}}, {}};
  for (const Check& c : checks) table.rows.push_back({c.what, c.state, c.remedy});
  print(table, *format);
  return ExitCode::kDone;
}

}  // namespace

void add_doctor(CLI::App& app, Action& action, const Invocation&) {
  auto* verb = app.add_subcommand("doctor", "what of this machine the program can use");
  auto format = std::make_shared<std::string>();
  add_format(*verb, *format);
  verb->callback([&action, format] { action = [format] { return doctor(*format); }; });
}

}  // namespace shardlab
