// calibrate: measures this machine and writes its machine file.
#include <fmt/format.h>
#include <unistd.h>

#include <filesystem>

#include "cli/common.h"
#include "cli/environment.h"
#include "cli/verbs.h"
#include "kernels/kernels.h"
#include "profiler/recorder.h"
#include "reports/format.h"
#include "reports/store.h"
#include "runtime/session.h"
#include "runtime/thread_transport.h"
#include "simulator/calibrate.h"
#include "simulator/machine_yaml.h"

namespace shardlab {
namespace {

struct CalibrateFlags {
  std::string backend = "cpu", out;
  double scale = 1;
};

/// Executes one calibration plan with the recorder on.
Result<Trace> execute_plan(const CalibrationPlan& plan, const Kernels& kernels, const CalibrationTokens& tokens) {
  const PlacedPlan placed = place(plan.plan);
  size_t most = 0;
  for (const Program& p : placed.programs)
    for (const auto& stream : p.streams) most = std::max(most, stream.size());
  CpuRecorder recorder(placed.plan->mesh.world_size(), placed.plan->streams, static_cast<int64_t>(most * 2 + 4) * plan.steps);
  recorder.set_on(false);
  RunOptions options;
  options.recorder = &recorder;
  ThreadTransport transport(kernels);
  auto session = Session::create(placed, options, transport, cpu_backend(kernels, {}), &tokens);
  if (!session.ok()) return session.error();
  (*session)->initialise_parameters();
  for (int step = 0; step < plan.warmup + plan.steps; ++step) {
    if (step == plan.warmup) recorder.set_on(true);
    (*session)->step(step);
  }
  return recorder.take();
}

/// Makes the folder of the file. Refuses what could not be written, before a minute of measuring is lost.
Result<void> check_writable(const std::string& out) {
  std::filesystem::path folder = std::filesystem::path(out).parent_path();
  if (folder.empty()) folder = ".";
  std::error_code failed;
  std::filesystem::create_directories(folder, failed);
  if (!failed && !std::filesystem::is_directory(out) && access(folder.c_str(), W_OK) == 0) return {};
  return Error{ExitCode::kUsage, fmt::format("{} cannot be written", out), "name another file with -o", {}};
}

Result<ExitCode> calibrate(const CalibrateFlags& flags, const Invocation& invocation) {
  if (flags.backend != "cpu")
    return Error{flags.backend == "cuda" ? ExitCode::kEnvironment : ExitCode::kUsage,
                 fmt::format("--backend {} cannot be calibrated by this build", flags.backend),
                 "use --backend cpu",
                 {}};
  const std::string out = flags.out.empty() ? default_machine_file() : flags.out;
  SHARDLAB_TRY(check_writable(out));
  const Kernels& kernels = kernels_for_this_processor();
  CalibrationOptions options;
  options.cores = usable_cores();
  options.scale = flags.scale;
  const std::vector<CalibrationPlan> plans = calibration_plans(options);
  const CalibrationTokens tokens;
  std::vector<CalibrationRun> runs;
  const bool terminal = stderr_is_terminal();
  for (size_t i = 0; i < plans.size(); ++i) {
    if (terminal) fmt::print(stderr, "\r\033[K[{}/{}] {}", i + 1, plans.size(), plans[i].name);
    auto trace = execute_plan(plans[i], kernels, tokens);
    if (!trace.ok()) return trace.error();
    runs.push_back({&plans[i], std::move(*trace), 0});
  }
  if (terminal) fmt::print(stderr, "\r\033[K");
  const Calibration calibration = fit(runs, {today(), invocation.command(), processor_name(), description(kernels)});
  const Machine machine = local_machine(calibration, options.cores, usable_memory() / options.cores);
  write_file_atomically(out, to_yaml(machine));
  fmt::print(stderr, "{} points, {} per core in fp32, {} memory, {} an op, {} a wake-up\nwrote {}\n", calibration.points.size(),
             fmt::format("{:.1f} Gflop/s", machine.device.peak_flops.at("fp32") / 1e9),
             bytes_per_second_text(machine.device.memory_bytes_per_s), seconds_text(calibration.op_overhead_s),
             seconds_text(calibration.wake_latency_s), out);
  return ExitCode::kDone;
}

}  // namespace

void add_calibrate(CLI::App& app, Action& action, const Invocation& invocation) {
  auto* verb = app.add_subcommand("calibrate", "measures this machine: kernels by shape, collectives by size, overheads");
  auto flags = std::make_shared<CalibrateFlags>();
  verb->add_option("--backend", flags->backend, "cpu or cuda")->default_val("cpu");
  verb->add_option("-o,--out", flags->out, "the machine file to write; by default where `machine: {local: true}` looks for it");
  verb->add_option("--scale", flags->scale, "of the number of repeats: 0.5 takes half as long")->check(number_in(0.01, 100));
  verb->callback([&action, &invocation, flags] { action = [flags, &invocation] { return calibrate(*flags, invocation); }; });
}

}  // namespace shardlab
