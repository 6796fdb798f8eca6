// run SWEEP.yaml: expands a sweep and runs its cases, saving every result as it comes.
#include <fmt/format.h>
#include <signal.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <map>
#include <set>
#include <span>
#include <tuple>

#include "cli/analytic_case.h"
#include "cli/case_process.h"
#include "cli/claims.h"
#include "cli/common.h"
#include "cli/environment.h"
#include "cli/execution.h"
#include "cli/namespaces.h"
#include "cli/pipeline.h"
#include "cli/progress.h"
#include "cli/verbs.h"
#include "plan/base/files.h"
#include "plan/base/world_error.h"
#include "reports/columns.h"
#include "reports/format.h"
#include "reports/store.h"
#include "reports/summary.h"
#include "runtime/crew.h"
#include "runtime/dataset.h"
#include "sweeps/resolution.h"

namespace shardlab::cli {
namespace {

struct RunFlags {
  std::string sweep, mode, resolution, out, machine_file, format, backend, transport, replay;
  std::vector<std::string> set;
  bool dry_run = false, resume = false;
  int jobs = 1;
};

std::atomic<bool> interrupted{false};

/// The first Ctrl-C ends the sweep after saving what is done; a second one ends the program at once.
void end_on_interrupt() {
  struct sigaction action {};
  action.sa_handler = [](int) { interrupted.store(true); };
  action.sa_flags = static_cast<int>(SA_RESETHAND);
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

/// Keeps outcomes in the run directory.
class DirectorySink final : public ResultSink {
 public:
  explicit DirectorySink(RunDirectory& directory) : directory_(directory) {}
  std::optional<CaseOutcome> recorded(std::string_view id, std::string_view version) const override {
    return directory_.store().recorded(id, version);
  }
  void append(const CaseOutcome& outcome) override { directory_.append(outcome); }

 private:
  RunDirectory& directory_;
};

/// Options for loading the sweep: what `--mode` says decides what the file must hold.
Result<LoadOptions> sweep_options(const RunFlags& flags) {
  std::vector<std::string> set = flags.set;
  if (!flags.backend.empty()) set.push_back("backend=" + flags.backend);
  if (!flags.transport.empty())
    set.push_back("transport=" + flags.transport);
  else if (flags.backend == "cuda")
    set.push_back("transport=one-gpu");
  LoadOptions options = load_options(flags.machine_file, set);
  if (flags.mode.empty()) return options;
  options.mode = mode_named(flags.mode);
  if (options.mode) return options;
  return Error{ExitCode::kUsage, fmt::format("--mode {} is unknown", flags.mode), "use simulate, measure or both", {}};
}

/// Predicted seconds of every runnable case, by lowering and simulating it.
double expected_seconds(const Expansion& expansion) {
  double seconds = 0;
  for (const Point& point : expansion.points) {
    if (point.refusal) continue;
    const auto chosen = decide(point.config);
    if (!chosen.ok()) continue;
    const auto placed = prepare(*chosen);
    if (!placed.ok()) continue;
    const auto predicted = predict_case(*chosen, *placed);
    const Measure& m = point.config.measure;
    if (predicted.ok()) seconds += predicted->figures.step_s * static_cast<double>(m.warmup + m.steps * m.repeat);
  }
  return seconds;
}

/// Counts, reasons and the expected time; nothing runs.
ExitCode dry_run(const Sweep& sweep, const Expansion& expansion, Mode mode, TableFormat format) {
  if (format != TableFormat::kTable) {
    std::vector<CaseOutcome> rows;
    for (const Point& point : expansion.points) {
      CaseOutcome row;
      row.case_id = point.id;
      row.config = point.config;
      row.status = point.refusal ? Status::kRefused : Status::kOk;
      if (point.refusal) row.reason = point.refusal->message;
      rows.push_back(std::move(row));
    }
    constexpr std::string_view kColumns[] = {"case_id", "name", "status", "reason",   "model",       "world_size",       "dp",
                                             "tp",      "pp",   "zero",   "schedule", "micro_batch", "grad_accumulation"};
    print(case_table(rows, kColumns), format);
    return expansion.runnable() > 0 ? ExitCode::kDone : ExitCode::kNo;
  }
  fmt::print("{}: {} combinations, {} excluded, {} included, {} duplicates\n{} points: {} to run, {} refused\n", sweep.name(),
             expansion.combinations, expansion.excluded, expansion.included, expansion.duplicates, expansion.points.size(),
             expansion.runnable(), expansion.refused());
  Table reasons{
      {{"points", Unit::kNone, "points"}, {"reason", Unit::kNone, "refused because"}, {"example", Unit::kNone, "for example"}}, {}};
  for (const ReasonCount& r : refusals(expansion)) reasons.rows.push_back({r.points, r.reason, r.example});
  if (!reasons.rows.empty()) print(reasons, format);
  const bool timed = std::ranges::all_of(expansion.points,
                                         [](const Point& p) { return p.refusal || check_calibrated(p.config.machine, "").ok(); });
  if (mode != Mode::kSimulate && expansion.runnable() > 0 && !timed) {
    fmt::print("expected time: not known, as this machine is not calibrated (`shardlab calibrate`)\n");
  } else if (mode != Mode::kSimulate && expansion.runnable() > 0) {
    const double training = expected_seconds(expansion);
    fmt::print("expected time: {} of training steps, and about {} to start the cases\n", seconds_text(training),
               seconds_text(0.3 * static_cast<double>(expansion.runnable())));
  }
  return expansion.runnable() > 0 ? ExitCode::kDone : ExitCode::kNo;
}

/// What predicts the sweep: the flag, or the file. Only the timeline predicts what can be laid beside a measurement.
Result<Resolution> resolution_for(const RunFlags& flags, const Sweep& sweep, Mode mode) {
  const auto named = resolution_named(flags.resolution);
  if (!flags.resolution.empty() && !named)
    return Error{
        ExitCode::kUsage, fmt::format("--resolution {} is unknown", flags.resolution), "use timeline, segments or analytic", {}};
  const Resolution resolution = named.value_or(resolution_of(sweep));
  if (resolution == Resolution::kTimeline || mode == Mode::kSimulate) return resolution;
  return Error{ExitCode::kUsage,
               fmt::format("mode {} at the {} resolution, which has no {}", name_of(mode), name_of(resolution),
                           resolution == Resolution::kAnalytic ? "plan to measure" : "trace to compare a measurement with"),
               "use --mode simulate, or --resolution timeline",
               {}};
}

/// A directory holds one sweep, which --resume goes on with. A run that ended before its first case left nothing to go on with.
Result<void> check_directory(const RunFlags& flags, const std::string& out, const RunDirectory& directory, const Sweep& sweep) {
  if (directory.cases().empty()) return {};
  if (!flags.resume)
    return Error{ExitCode::kUsage, fmt::format("{} already holds results", out), "go on with --resume, or name another --out", {}};
  const auto runs = directory.store().runs();
  if (runs.empty() || runs.back().sweep == sweep.name()) return {};
  return Error{ExitCode::kUsage,
               fmt::format("{} holds results of the sweep `{}`, and this one is `{}`", out, runs.back().sweep, sweep.name()),
               "name another --out", sweep.file()};
}

/// Of what the directory holds, the points of this expansion. The rest are of an earlier text of the sweep.
std::vector<CaseOutcome> of_expansion(std::vector<CaseOutcome> outcomes, const Expansion& expansion) {
  std::set<std::string_view> ids;
  for (const Point& point : expansion.points) ids.insert(point.id);
  const auto others = std::erase_if(outcomes, [&](const CaseOutcome& o) { return !ids.contains(o.case_id); });
  if (others > 0)
    fmt::print(stderr, "{} of the directory's results are of points that this sweep no longer has: they stay in results.csv\n",
               others);
  return outcomes;
}

/// Opens every data set that the sweep trains on: what no case could read, or validate on, is refused before anything runs.
Result<void> check_data(const Expansion& expansion, Mode mode) {
  if (mode == Mode::kSimulate) return {};
  std::map<std::tuple<std::string, std::string, int64_t, int64_t>, int64_t> opened;  // and the sequences of its validation split
  for (const Point& point : expansion.points) {
    const Case& c = point.config;
    if (point.refusal) continue;
    const auto [known, first] = opened.emplace(std::tuple(c.data.text, c.data.tokens, c.train.seq_len, c.model.vocab), 0);
    if (first) {
      const auto data = open_dataset(c.data, {c.train.seq_len, c.model.vocab, kValidationFraction, c.train.seed});
      if (!data.ok()) return data.error();
      known->second = data->validation_sequences();
    }
    SHARDLAB_TRY(check_validation(c, known->second));
  }
  return {};
}

/// Refuses before anything runs what no case of the sweep could be measured on.
Result<void> check_backends(const Expansion& expansion, Mode mode) {
  if (mode == Mode::kSimulate) return {};
  for (const Point& point : expansion.points)
    if (!point.refusal) SHARDLAB_TRY(check_backend(point.config.backend));
  return {};
}

/// Refuses before anything runs what cannot be predicted: a local machine whose speed nobody measured.
Result<void> check_speed_known(const Expansion& expansion, Mode mode) {
  if (mode == Mode::kMeasure) return {};
  for (const Point& point : expansion.points)
    if (!point.refusal)
      SHARDLAB_TRY(check_calibrated(point.config.machine, fmt::format("mode {}, which predicts,", name_of(mode))));
  return {};
}

/// Refuses two cases that would save in one folder.
Result<void> check_checkpoint_folders(const Expansion& expansion) {
  std::set<std::string> folders;
  for (const Point& point : expansion.points) {
    const Checkpointing& c = point.config.checkpoint;
    if (point.refusal || c.folder.empty() || folders.insert(c.folder).second) continue;
    return Error{ExitCode::kUsage,
                 fmt::format("two cases save their checkpoints in {}", c.folder),
                 "leave checkpoint.folder out: each case then has a folder of its own in the run directory",
                 {}};
  }
  return {};
}

/// Of more cases than a person reads, those predicted to be fastest.
std::vector<CaseOutcome> fastest(const std::vector<CaseOutcome>& outcomes, size_t most) {
  std::vector<CaseOutcome> some;
  std::vector<std::pair<double, size_t>> order;
  for (size_t i = 0; i < outcomes.size(); ++i)
    if (outcomes[i].status == Status::kOk && outcomes[i].predicted) order.emplace_back(outcomes[i].predicted->step_s, i);
  std::ranges::sort(order);
  for (size_t i = 0; i < std::min(most, order.size()); ++i) some.push_back(outcomes[order[i].second]);
  return some;
}

void print_results(const std::vector<CaseOutcome>& outcomes, const std::vector<Claim>& claims, TableFormat format) {
  constexpr size_t kReadable = 2000, kShown = 20;
  if (format == TableFormat::kTable && outcomes.size() > kReadable) {
    print(case_table(fastest(outcomes, kShown), summary_columns()), format);
    fmt::print("\nthe fastest of {} cases\n", outcomes.size());
  } else {
    print(case_table(outcomes, summary_columns()), format);
  }
  if (format != TableFormat::kTable) return;
  fmt::print("\n");
  for (const Statement& s : verdicts(claims, outcomes)) fmt::print("{}\n", s.text);
  for (const Statement& s : statements(outcomes, summarise(outcomes))) fmt::print("{}\n", s.text);
}

Result<DriveSummary> drive_cases(std::span<const Point> points, RunDirectory& directory, const std::string& out,
                                 const Invocation& invocation, const RunFlags& flags, Resolution resolution,
                                 const DriveOptions& options) {
  ProcessCaseRunner runner(out, invocation.program, interrupted, flags.replay, resolution);
  DirectorySink sink(directory);
  ProgressPrinter progress(stderr_is_terminal());
  const SteadyClock clock;
  auto summary = drive(points, runner, sink, progress, clock, options);
  progress.end();
  return summary;
}

Result<DriveSummary> drive_analytic(std::span<const Point> points, RunDirectory& directory, const DriveOptions& options) {
  AnalyticCaseRunner runner;
  BatchSink sink(directory);
  SparseProgress progress;
  const SteadyClock clock;
  auto summary = drive(points, runner, sink, progress, clock, options);
  sink.flush();
  return summary;
}

Result<ExitCode> run(const RunFlags& flags, const Invocation& invocation) {
  const auto format = parse_format(flags.format);
  if (!format.ok()) return format.error();
  if (flags.mode != "simulate") SHARDLAB_TRY(check_backend(flags.backend));
  const auto options = sweep_options(flags);
  if (!options.ok()) return options.error();
  const auto sweep = load_sweep(flags.sweep, *options);
  if (!sweep.ok()) return sweep.error();
  const Mode mode = options->mode.value_or(sweep->mode());
  const auto resolution = resolution_for(flags, *sweep, mode);
  if (!resolution.ok()) return resolution.error();
  const auto expansion = expand(*sweep, *resolution);
  if (!expansion.ok()) return expansion.error();
  if (flags.dry_run) return dry_run(*sweep, *expansion, mode, *format);

  if (flags.out.empty() && (sweep->name().find('/') != std::string::npos || sweep->name().starts_with(".")))
    return Error{ExitCode::kUsage, fmt::format("the sweep's name `{}` cannot be that of a run directory", sweep->name()),
                 "call it by a word without slashes, or name the directory with --out", sweep->file()};
  const std::string out = flags.out.empty() ? "runs/" + sweep->name() : flags.out;
  SHARDLAB_TRY(check_backends(*expansion, mode));
  SHARDLAB_TRY(check_speed_known(*expansion, mode));
  SHARDLAB_TRY(check_data(*expansion, mode));
  SHARDLAB_TRY(check_checkpoint_folders(*expansion));
  RunMetadata metadata = describe_environment(invocation.command());
  // Rows of another resolution are asked again.
  if (*resolution != Resolution::kTimeline) metadata.program_version += fmt::format(" {}", name_of(*resolution));
  metadata.sweep = sweep->name();
  metadata.claims = sweep->claims();
  metadata.loss_target = sweep->loss_target();
  for (const Point& point : expansion->points)
    if (point.config.machine.calibration) metadata.calibration_id = point.config.machine.calibration->id;
  DriveOptions drive_options;
  drive_options.mode = mode;
  drive_options.resume = flags.resume;
  drive_options.program_version = metadata.program_version;
  drive_options.jobs = flags.jobs;
  drive_options.interrupted = &interrupted;
  SHARDLAB_TRY(check(drive_options));
  auto lock = RunLock::take(out, metadata.command);
  if (!lock.ok()) return lock.error();
  auto directory = RunDirectory::open(std::move(*lock));
  if (!directory.ok()) return directory.error();
  SHARDLAB_TRY(check_directory(flags, out, *directory, *sweep));
  directory->begin(metadata);

  end_on_interrupt();
  const auto summary = *resolution == Resolution::kAnalytic
                           ? drive_analytic(expansion->points, *directory, drive_options)
                           : drive_cases(expansion->points, *directory, out, invocation, flags, *resolution, drive_options);
  directory->finish();
  if (!summary.ok()) return summary.error();
  print_results(of_expansion(directory->cases(), *expansion), sweep->claims(), *format);
  std::fflush(stdout);  // both may go to one file
  fmt::print(stderr, "\nresults: {0}/results.csv, {0}/results.sqlite\n", out);
  if (summary->interrupted)
    fmt::print(stderr, "interrupted; to go on: {}{}\n", invocation.command(), flags.resume ? "" : " --resume");
  return summary->exit;
}

}  // namespace

void add_run(CLI::App& app, Action& action, const Invocation& invocation) {
  auto* verb = app.add_subcommand("run", "runs a sweep: predicts its cases, measures them, or both");
  auto flags = std::make_shared<RunFlags>();
  verb->add_option("sweep", flags->sweep, "the sweep file (sweeps/README.md is its reference)")->required();
  verb->add_option("--mode", flags->mode, "simulate, measure or both, instead of the file's");
  verb->add_option("--resolution", flags->resolution,
                   "timeline, segments (the same figures sooner, no trace) or analytic (closed forms: many points, other "
                   "frameworks), instead of the file's");
  verb->add_option("--out", flags->out, "the run directory; runs/NAME by default");
  verb->add_option("--machine-file", flags->machine_file, "calibrated machine file that `machine: {local: true}` means");
  verb->add_option("--backend", flags->backend,
                   "cpu, cuda or dry, instead of the file's; cuda with transport one-gpu, or --transport");
  verb->add_option("--transport", flags->transport, "threads, one-gpu or nccl, instead of the file's");
  verb->add_option("--set", flags->set, "key=value instead of what the file says; may be repeated");
  verb->add_option("--replay", flags->replay,
                   "a run directory: parameter servers with a staleness repeat the arrivals that its cases logged");
  verb->add_flag("--dry-run", flags->dry_run, "print counts, reasons and the expected time; run nothing");
  verb->add_flag("--resume", flags->resume, "skip cases that the run directory already has");
  verb->add_option("--jobs", flags->jobs, "cases at once, with --mode simulate")->check(number_in(1, 1024));
  add_format(*verb, flags->format);
  verb->callback([&action, &invocation, flags] { action = [flags, &invocation] { return run(*flags, invocation); }; });
}

}  // namespace shardlab::cli
