// calibrate: measures this machine and writes its machine file, or corrects a described one by a user's own runs.
#include <fmt/format.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <sstream>

#include "cases/environment.h"
#include "cases/execution.h"
#include "cli/common.h"
#include "cli/namespaces.h"
#include "cli/run_tables.h"
#include "cli/verbs.h"
#include "kernels/kernels.h"
#include "plan/base/pending_file.h"
#include "reports/format.h"
#include "runtime/core_scheduler.h"
#include "runtime/cuda/api.h"
#include "runtime/session.h"
#include "simulator/estimator/validate/own_runs.h"
#include "simulator/estimator/validate/predictor.h"
#include "simulator/interpreter/calibrate.h"
#include "simulator/interpreter/machine_yaml.h"
#include "sweeps/document.h"

namespace shardlab::cli {
namespace {

struct CalibrateFlags {
  std::string backend = "cpu", out, from;
  double scale = 1;
};

/// What is calibrated: its kernels as results name them, and how its machine file is made.
struct Target {
  CalibrationOptions options;
  BackendKind backend;
  TransportKind transport;
  std::string processor, kernels;
  double turn_s = 0;         ///< Calibration::turn_s
  int devices = 0;           ///< of a GPU target
  int64_t memory_bytes = 0;  ///< of a device
};

/// Executes one calibration plan with the recorder on.
Result<Trace> execute_plan(const CalibrationPlan& plan, const Target& target, const CalibrationTokens& tokens) {
  const PlacedPlan placed = place(plan.plan);
  size_t most = 0;
  for (const Program& p : placed.programs)
    for (const auto& stream : p.streams) most = std::max(most, stream.size());
  ExecutionOptions wanted{target.backend, target.transport, plan.canonical};
  wanted.attention = AttentionBy::kAuto;
  wanted.events_per_stream = static_cast<int64_t>(most * 2 + 4) * plan.steps;
  auto execution = Execution::create(placed, wanted);
  if (!execution.ok()) return execution.error();
  RunOptions options;
  (*execution)->attach(options);
  auto session = Session::create(placed, options, (*execution)->transport(), (*execution)->backends(), &tokens);
  if (!session.ok()) return session.error();
  (*session)->initialise_parameters();
  for (int step = 0; step < plan.warmup + plan.steps; ++step) {
    if (step == plan.warmup) (*execution)->set_recording(true);
    (*session)->step(step);
  }
  return (*execution)->take();
}

Target processor_target() {
  Target t{.backend = BackendKind::kCpu, .transport = TransportKind::kThreads, .processor = processor_name(), .kernels = {}};
  t.kernels = description(kernels::kernels_for_this_processor());
  t.options.cores = usable_cores();
  t.turn_s = CoreScheduler::kTurn_s;
  t.memory_bytes = usable_memory() / t.options.cores;
  return t;
}

Result<Target> gpu_target() {
  SHARDLAB_TRY(check_backend(BackendKind::kCuda));
  auto api = cuda::real_api();
  if (!api.ok()) return api.error();
  const cuda::Presence presence = cuda::presence(**api);
  cuda::Properties device;
  if ((*api)->properties(0, &device) != cuda::kSuccess)
    return Error{ExitCode::kEnvironment, "the device does not say what it is", "see what nvidia-smi says", ""};
  Target t{.backend = BackendKind::kCuda, .transport = TransportKind::kOneGpu, .processor = device.name, .kernels = {}};
  t.kernels = fmt::format("cuda {}.{}, CUDA {}, driver {}", device.major, device.minor, cuda::version_text(presence.runtime),
                          cuda::version_text(presence.driver));
  t.options.target = CalibrationTarget::kGpu;
  t.devices = presence.devices;
  t.memory_bytes = device.memory_bytes;
  return t;
}

Result<Target> target_of(const std::string& backend) {
  if (backend == "cpu") return processor_target();
  if (backend == "cuda") return gpu_target();
  return Error{ExitCode::kUsage, fmt::format("--backend {} cannot be calibrated", backend), "use cpu or cuda", {}};
}

Machine machine_of(const Target& target, const Calibration& calibration) {
  if (target.devices == 0) return local_machine(calibration, target.options.cores, target.memory_bytes);
  return local_gpu_machine(calibration, target.processor, target.devices, target.memory_bytes);
}

void save(const std::string& out, const Machine& machine) {
  const std::filesystem::path folder = std::filesystem::path(out).parent_path();
  std::error_code ignored;
  if (!folder.empty()) std::filesystem::create_directories(folder, ignored);
  write_output(out, to_yaml(machine));
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

/// What is predicted cannot be more certain than what was measured.
void print_steadiness(const Calibration& calibration) {
  constexpr double kUnsteady = 0.4;
  bool unsteady = false;
  std::string text;
  for (const auto& [concurrency, spread] : spread_of_products(calibration)) {
    unsteady |= spread > kUnsteady;
    text += fmt::format("{}{:.0f} % with {} {} busy", text.empty() ? "" : ", ", 100 * spread, concurrency,
                        concurrency == 1 ? "rank" : "ranks");
  }
  if (text.empty()) return;
  fmt::print(stderr, "80 % of the repeats of a matrix product lie within {}{}\n", text,
             unsteady ? ": this machine was not quiet, calibrate again when it is" : "");
}

/// The machine as a file of its own: the text that a case holds it in, without the two lines that lead to it.
std::string machine_file(const Machine& machine, const std::string& comment) {
  std::string text = "# " + comment + "\n";
  std::istringstream lines(machine_yaml(machine));
  std::string line;
  for (int i = 0; std::getline(lines, line); ++i)
    if (i >= 2) text += line.substr(4) + "\n";
  return text;
}

std::string mean_error(std::span<const validation::Run> runs) {
  const validation::Predictor predict = validation::analytic_predictor();
  double sum = 0;
  int count = 0;
  for (const validation::Run& run : runs)
    if (const auto p = predict(run); p.ok()) sum += std::fabs(p->step_s / *run.measured.step_s - 1), ++count;
  return fmt::format("{:.1f} %", count > 0 ? 100 * sum / count : 0);
}

/// The machine of the rows, corrected by their step times.
Result<ExitCode> correct(const CalibrateFlags& flags) {
  if (flags.out.empty())
    return Error{ExitCode::kUsage, "--from without -o", "name the machine file to be written: -o my-cluster.yaml", {}};
  SHARDLAB_TRY(check_writable(flags.out));
  const auto tables = tables_of({flags.from});
  if (!tables.ok()) return tables.error();
  std::vector<validation::Run> runs;
  for (const validation::Row& row : tables->front().rows) {
    if (!row.run.ok()) {
      fmt::print(stderr, "left out: {}\n", to_string(row.run.error()));
      continue;
    }
    if (row.run->measured.step_s) runs.push_back(*row.run);
  }
  if (runs.empty())
    return Error{ExitCode::kUsage,
                 fmt::format("{} has no run with a measured step", flags.from),
                 "fill measured_step_s or measured_tokens_per_s",
                 {}};
  for (const validation::Run& run : runs)
    if (run.machine.id != runs.front().machine.id)
      return Error{ExitCode::kUsage,
                   fmt::format("runs on {} and on {}", runs.front().machine.id, run.machine.id),
                   "one machine is corrected at a time: a file for each",
                   {}};
  if (runs.front().machine.local)
    return Error{ExitCode::kUsage, "runs on this machine", "measure it: shardlab calibrate without --from", {}};
  const auto predict = validation::analytic_predictor();
  for (const validation::Run& run : runs)
    if (const auto p = predict(run); !p.ok()) return p.error();
  const validation::Correction correction = fit_correction(runs, validation::analytic_predictor, analytic::published_learnt().step);
  std::string factors;
  for (size_t i = 0; i < validation::kMachineParts; ++i)
    factors += fmt::format("{}{} {:.3f}", factors.empty() ? "" : ", ", name_of(static_cast<validation::MachinePart>(i)),
                           correction.factors[i]);
  const std::string before = mean_error(runs);
  const Machine machine = corrected(runs.front().machine, correction);
  for (validation::Run& run : runs) run.machine = corrected(run.machine, correction);
  write_output(flags.out, machine_file(machine, fmt::format("{} corrected by {} of its own runs. Rates times: {}", machine.id,
                                                            runs.size(), factors)));
  fmt::print(stderr, "rates of {} times: {}\n{} predicted {} off in the mean, and {} {} now\nwrote {}\n", machine.id, factors,
             runs.size() == 1 ? "the run was" : fmt::format("the {} runs were", runs.size()), before,
             runs.size() == 1 ? "is" : "are", mean_error(runs), flags.out);
  return ExitCode::kDone;
}

Result<ExitCode> calibrate(const CalibrateFlags& flags, const Invocation& invocation) {
  if (!flags.from.empty()) return correct(flags);
  auto target = target_of(flags.backend);
  if (!target.ok()) return target.error();
  const std::string out = flags.out.empty() ? default_machine_file() : flags.out;
  SHARDLAB_TRY(check_writable(out));
  target->options.scale = flags.scale;
  const std::vector<CalibrationPlan> plans = calibration_plans(target->options);
  const CalibrationOrigin origin{today(),         invocation.command(), target->processor,
                                 target->kernels, target->turn_s,       target->devices > 0};
  const CalibrationTokens tokens;
  std::vector<CalibrationRun> runs;
  const bool terminal = stderr_is_terminal();
  for (size_t i = 0; i < plans.size(); ++i) {
    if (terminal || target->devices > 0)
      fmt::print(stderr, "{}[{}/{}] {}{}", terminal ? "\r\033[K" : "", i + 1, plans.size(), plans[i].name, terminal ? "" : "\n");
    auto trace = execute_plan(plans[i], *target, tokens);
    if (!trace.ok()) return trace.error();
    runs.push_back({&plans[i], std::move(*trace), 0});
    // A GPU is often lent by the minute: what is measured so far is kept, should the program be ended.
    if (target->devices == 0) continue;
    if (const Calibration so_far = fit(runs, origin); !so_far.points.empty()) save(out, machine_of(*target, so_far));
  }
  if (terminal) fmt::print(stderr, "\r\033[K");
  const Calibration calibration = fit(runs, origin);
  const Machine machine = machine_of(*target, calibration);
  save(out, machine);
  std::string peaks;
  for (const auto& [precision, flops] : machine.device.peak_flops)
    peaks += fmt::format(", {:.1f} Gflop/s in {}", flops / 1e9, precision);
  const std::string handover =
      target->devices > 0 ? "" : fmt::format(", {} for a core to pass to another thread", seconds_text(calibration.handover_s));
  fmt::print(stderr, "{} points{} per {}, {} of memory bandwidth, {} to start an op, {} to wake a thread{}\nwrote {}\n",
             calibration.points.size(), peaks, target->devices > 0 ? "device" : "core",
             bytes_per_second_text(machine.device.memory_bytes_per_s), seconds_text(calibration.op_overhead_s),
             seconds_text(calibration.wake_latency_s), handover, out);
  print_steadiness(calibration);
  return ExitCode::kDone;
}

}  // namespace

void add_calibrate(CLI::App& app, Action& action, const Invocation& invocation) {
  auto* verb = app.add_subcommand("calibrate", "measures this machine: kernels by shape, collectives by size, overheads");
  auto flags = std::make_shared<CalibrateFlags>();
  verb->add_option("--backend", flags->backend, "cpu or cuda")->default_val("cpu");
  verb->add_option(
      "--from", flags->from,
      "measure nothing: correct the machine of these runs (a table as validate reads it) by their step times, three are enough");
  verb->add_option("-o,--out", flags->out, "the machine file to write; by default where `machine: {local: true}` looks for it");
  verb->add_option("--scale", flags->scale,
                   "share of the usual number of repeats, as 0.5; part of the time is the same whatever the number")
      ->check(number_in(0.01, 100));
  verb->callback([&action, &invocation, flags] { action = [flags, &invocation] { return calibrate(*flags, invocation); }; });
}

}  // namespace shardlab::cli
