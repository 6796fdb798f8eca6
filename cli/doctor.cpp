// doctor: the parts of this machine that the program can use, and remedies for the rest.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "cases/environment.h"
#include "cases/execution.h"
#include "cases/job_place.h"
#include "cli/common.h"
#include "cli/namespaces.h"
#include "cli/verbs.h"
#include "kernels/cuda/cudnn_api.h"
#include "kernels/kernels.h"
#include "plan/base/files.h"
#include "profiler/gpu/nvml.h"
#include "profiler/gpu/recorder.h"
#include "profiler/process.h"
#include "reports/format.h"
#include "runtime/cuda/api.h"
#include "runtime/cuda/nccl_api.h"
#include "runtime/gloo_transport.h"
#include "runtime/mpi_library.h"

namespace shardlab::cli {
namespace {

struct Check {
  std::string what, state, remedy;
};

std::string variants() {
  std::string text;
  for (const kernels::Kernels* k : kernels::all_variants())
    if (kernels::runs_here(*k)) text += fmt::format("{}{}", text.empty() ? "" : ", ", k->name);
  return text;
}

/// A library that is only looked for: nothing of it is called.
Check library(const char* what, const std::vector<std::string>& files, const char* remedy) {
  const SharedLibrary opened(files);
  if (!opened.is_open()) return {what, "not found", remedy};
  return {what, "found: " + opened.name(), ""};
}

Check status(const char* what, const LibraryStatus& s) {
  return {what, s.ok() ? "ok" : fmt::format("{}: {}", name_of(s.state), s.message), s.remedy};
}

/// cuDNN's state: not there, there without a device to run on, ok.
Check cudnn_check(const cuda::Presence& presence) {
  const auto cudnn = gpu::real_cudnn();
  if (!cudnn.ok()) return {"cuDNN", cudnn.error().message, cudnn.error().hint};
  const std::string version = gpu::cudnn_version_text((*cudnn)->version());
  if (!presence.usable())
    return {"cuDNN", version + ", without a device", "needed for --backend cuda only, and not with `attention: own`"};
  gpu::CudnnHandle handle = nullptr;
  const gpu::CudnnStatus status = (*cudnn)->create(&handle);
  if (status != 0)
    return {"cuDNN", fmt::format("{} does not start: {}", version, (*cudnn)->describe(status)), "`attention: own` needs no cuDNN"};
  (*cudnn)->destroy(handle);
  return {"cuDNN", version, ""};
}

/// The driver with its devices, the runtime, and every library that a run on GPUs may want.
std::vector<Check> cuda_checks() {
  const cuda::Presence p = cuda::presence();
  std::vector<Check> checks;
  checks.push_back({"CUDA driver", p.driver == 0 ? "not found" : fmt::format("for CUDA {}", cuda::version_text(p.driver)),
                    p.driver == 0 ? "needed for --backend cuda only: a machine with an NVIDIA GPU and its driver" : ""});
  checks.push_back({"CUDA runtime", p.built ? fmt::format("{}, built in", cuda::version_text(p.runtime)) : "not built in",
                    p.built ? "" : p.remedy});
  checks.push_back({"CUDA devices", p.usable() ? fmt::format("{}", p.devices) : "none: " + p.reason, p.usable() ? "" : p.remedy});
  checks.push_back(library("cuBLASLt", {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"},
                           "needed for --backend cuda only, and not with `canonical: true`"));
  checks.push_back(cudnn_check(p));
  const auto nccl = cuda::real_nccl();
  int version = 0;
  if (nccl.ok()) (*nccl)->version(&version);
  checks.push_back(
      {"NCCL", nccl.ok() ? cuda::nccl_version_text(version) : nccl.error().message, nccl.ok() ? "" : nccl.error().hint});
  checks.push_back(status("CUPTI", cupti_status()));
  checks.push_back(status("NVML", nvml_status()));
  return checks;
}

Check calibration() {
  const std::vector<std::string> files = local_machine_files("");
  const auto found = std::ranges::find_if(files, [](const std::string& file) { return is_there(file); });
  if (found == files.end())
    return {"calibration", fmt::format("none: there is no {}", fmt::join(files, " and no ")),
            "run `shardlab calibrate` (about a minute)"};
  const std::string& path = *found;
  const auto machine = load_local_machine(path);
  if (!machine.ok()) return {"calibration", "unreadable: " + machine.error().message, "run `shardlab calibrate` again"};
  return {"calibration",
          machine->calibration ? fmt::format("{} of {}, in {}", machine->calibration->id, machine->calibration->date, path)
                               : "none in " + path,
          ""};
}

/// Where `launch` would take this process to stand.
Check place_in_job(const JobPlaceFlags& flags) {
  const auto placement = find_job_place(flags, process_environment());
  if (!placement.ok()) return {"place in a job", placement.error().message, placement.error().hint};
  if (!*placement)
    return {"place in a job", "none: started by hand", "torchrun, srun or mpirun give one; `shardlab launch -n N` needs none"};
  return {"place in a job", to_string(**placement), ""};
}

/// The libraries that messages between processes may go over.
std::vector<Check> wire_checks() {
  std::vector<Check> checks;
  const auto gloo = GlooLibrary::open(gloo_file());
  checks.push_back({"Gloo", gloo.ok() ? "ok" : gloo.error().message, gloo.ok() ? "" : gloo.error().hint});
  const auto mpi = open_mpi(mpi_files());
  checks.push_back({"MPI", mpi.ok() ? (*mpi)->version() : mpi.error().message, mpi.ok() ? "" : mpi.error().hint});
  return checks;
}

Result<ExitCode> doctor(const std::string& format_name, const JobPlaceFlags& placement) {
  const auto format = parse_format(format_name);
  if (!format.ok()) return format.error();
  EnergyMeter energy;
  const bool readable = energy.joules().has_value();
  std::vector<Check> checks{
      {"program", version_line(), ""},
      {"processor", fmt::format("{}, {} cores", processor_name(), usable_cores()), ""},
      {"memory", bytes_text(usable_memory()) + " available", ""},
      {"kernels", variants(), ""},
      {"matrix library", description(kernels::kernels_for_this_processor()), ""},
      calibration(),
      place_in_job(placement),
      {"energy counters", readable ? "readable" : "not readable", energy.why_not()},
  };
  for (Check& c : wire_checks()) checks.push_back(std::move(c));
  for (Check& c : cuda_checks()) checks.push_back(std::move(c));
  Table table{{{"what"}, {.name = "state", .wraps = true}, {.name = "remedy", .wraps = true}}, {}};
  for (const Check& c : checks) table.rows.push_back({c.what, c.state, c.remedy});
  print(table, *format);
  return ExitCode::kDone;
}

}  // namespace

void add_doctor(CLI::App& app, Action& action, const Invocation&) {
  auto* verb = app.add_subcommand("doctor", "what of this machine the program can use");
  auto format = std::make_shared<std::string>();
  auto placement = std::make_shared<JobPlaceFlags>();
  add_format(*verb, *format);
  add_job_place_flags(*verb, *placement);
  verb->callback([&action, format, placement] { action = [format, placement] { return doctor(*format, *placement); }; });
}

}  // namespace shardlab::cli
