#include "cases/case_process.h"

#include <fmt/format.h>
#include <signal.h>

#include <algorithm>
#include <filesystem>
#include <utility>

#include "cases/children.h"
#include "cases/execution.h"
#include "cases/interrupt.h"
#include "cases/namespaces.h"
#include "cases/pipeline.h"
#include "cases/recorded_case.h"
#include "cases/restart.h"
#include "cases/seats.h"
#include "plan/base/files.h"
#include "plan/base/pending_file.h"
#include "plan/base/utf8.h"
#include "plan/base/world_error.h"
#include "plan/text.h"
#include "profiler/trace_file.h"
#include "reports/columns.h"
#include "reports/store.h"
#include "simulator/interpreter/machine_yaml.h"

namespace shardlab::cases {
namespace {

/// A plan that does not fit is out of memory, and one that does not verify is no illegal layout but a bug of ours.
CaseOutcome ended_by(CaseOutcome outcome, const Error& error) {
  return refused(std::move(outcome), error,
                 error.code == ExitCode::kNo    ? Status::kOom
                 : error.code == ExitCode::kBug ? Status::kFailed
                                                : Status::kRefused);
}

/// What measuring takes beyond training: the arena of the validation step, which the peak of a step does not have.
Result<void> validation_fits(const Case& config, const PlacedRun& training) {
  if (!validates(config)) return {};
  const auto validation = prepare_validation(config);
  if (!validation.ok()) return validation.error();
  return fits(config, training, &*validation);
}

/// Its ranks are in several processes.
bool is_shared_out(const Case& config) { return is_between_processes(config.transport); }

}  // namespace

Result<int> processes_of(const Case& config, const ProcessShare& share) {
  if (!is_shared_out(config)) return 1;
  const int ranks = config.layout.world_size(), each = std::max(share.ranks_per_process, 1);
  const int processes = share.processes > 0 ? share.processes : std::max(ranks / each, 1);
  const bool even = ranks % processes == 0 && (share.ranks_per_process == 0 || processes * each == ranks);
  if (even) return processes;
  return Error{ExitCode::kUsage,
               share.ranks_per_process == 0
                   ? fmt::format("{} ranks in {} processes, which cannot have as many each", ranks, processes)
                   : fmt::format("{} ranks in {} processes of {} ranks", ranks, processes, each),
               "set -n and --ranks-per-process so that their product is dp * tp * pp * cp", ""};
}

/// The logs that the child repeats lie beside its case; those of a run before are taken away.
Result<void> ProcessCaseRunner::lay_out_replay(const Case& config, const std::string& directory) const {
  const CaseFiles files{directory};
  const bool repeats = !replay_.empty() && config.layout.parameter_server.staleness >= 0;
  for (int server = 0; server < config.layout.parameter_server.servers; ++server) {
    std::error_code failure;
    std::filesystem::remove(files.replay(server), failure);
    if (!repeats) continue;
    const std::string from = CaseFiles{replay_ + "/" + case_id(config)}.arrivals(server);
    std::filesystem::copy_file(from, files.replay(server), failure);
    if (failure)
      return Error{ExitCode::kUsage, fmt::format("the arrivals to be replayed cannot be read: {}: {}", from, failure.message()),
                   "give --replay the directory of a run that measured this very case", ""};
  }
  return {};
}

int ProcessCaseRunner::measure(CaseOutcome& outcome, const std::string& directory, const ProcessShare& share) const {
  const CaseFiles files{directory};
  Store::remove(files.outcome());
  std::error_code ignored;
  std::filesystem::remove(files.picture(), ignored);
  const auto processes = processes_of(outcome.config, share);
  if (!processes.ok()) {
    outcome = refused(std::move(outcome), processes.error());
    return 0;
  }
  const bool shared_out = is_shared_out(outcome.config);
  const bool seated = shared_out && seats_ != nullptr;
  std::optional<ControlServer> server;
  ChildPlace place{.processes = *processes, .server = {}, .token = {}};
  if (shared_out) {
    place.token = new_token();
    server.emplace(*processes, Endpoint{seated ? seats_->host() : Endpoint().host, 0}, place.token,
                   outcome.config.measure.timeout_s);
    place.server = to_string(server->endpoint());
  }
  const double timeout_s = outcome.config.measure.timeout_s;
  const bool traces = traces_ != Traces::kNone;
  if (seated)
    seats_->start(
        {outcome.case_id, to_yaml(outcome.config), to_yaml(outcome.config.machine), place.server, place.token, timeout_s, traces},
        *server);
  Children children;
  const bool launches = outcome.config.transport == TransportKind::kMpi && !seated;
  if (launches) place.launcher = launched_by(share.launcher, *processes, {});
  for (; place.process < (seated || launches ? 1 : *processes); ++place.process) {
    children.add(start_child(program_, files, traces, place));
    place.group = children.processes.front();
  }
  interrupt::set_case_group(children.processes.front());
  const ChildEnd end = wait_for(children, timeout_s, files, interrupted_);
  interrupt::set_case_group(0);
  std::vector<int> statuses = children.statuses;
  if (seated) {
    if (children.any_failed() || !children.all_ended())
      server->fail({.message = "process 0 has ended"});  // where nobody has said more
    std::vector<SeatEnd> ends;
    try {
      ends = seats_->collect();
    } catch (const WorldError&) {
      if (children.all_ended() && !children.any_failed()) throw;
      // A process of the job is lost, and the case has said why by itself. Those that follow are told so.
    }
    for (size_t i = 1; i < ends.size(); ++i) {
      statuses.push_back(ends[i].status);
      write_file_atomically(files.log(static_cast<int>(i)), ends[i].log);
    }
  }
  if (end.timed_out) {
    outcome.status = Status::kTimeout;
    const bool one = end.still.size() == 1;
    const std::string still = end.still.empty() ? ""
                                                : fmt::format(", process{} {} stand{} still", one ? "" : "es",
                                                              fmt::join(end.still, ", "), one ? "s" : "");
    // Ranks that had waited for as long have given up, and ended before somebody could ask them: the group knows why.
    const auto failure = server ? server->failure() : std::nullopt;
    const std::string& at = !end.picture.empty()                   ? end.picture
                            : failure && !failure->message.empty() ? failure->message
                                                                   : end.stopped;
    outcome.reason = fmt::format("not done after {} s{}{}{}; raise measure.timeout, or see {}", timeout_s, still,
                                 at.empty() ? "" : ": ", at, files.log());
    return seated || launches ? 0 : end.taken;
  }
  outcome.status = Status::kFailed;
  if (end.interrupted) {
    outcome.reason = "interrupted";
    return 0;
  }
  if (!children.all_ended() || std::ranges::any_of(statuses, [](int status) { return status != 0; })) {
    outcome.reason = why_failed(statuses, server ? server->failure() : std::nullopt, files);
    return seated || launches ? 0 : end.taken;  // others start those again
  }
  outcome.reason = how_it_ended(0, files.log());
  const auto store = Store::open_existing(files.outcome());
  if (!store.ok()) return 0;
  const auto measured = store->outcomes();
  if (measured.empty()) return 0;
  outcome.status = measured.front().status;
  outcome.reason = measured.front().reason;
  outcome.measured = measured.front().measured;
  outcome.ops = measured.front().ops;
  return 0;
}

CaseOutcome ProcessCaseRunner::run(const sweeps::Point& point, Mode mode) {
  const Case& config = point.config;
  CaseOutcome outcome;
  outcome.case_id = case_id(config);
  outcome.config = config;
  outcome.parameters = parameter_count(config.model);
  const auto chosen = decide(config);
  if (!chosen.ok()) return ended_by(std::move(outcome), chosen.error());
  outcome.config = *chosen;
  const std::string folder =
      chosen->checkpoint.folder.empty() ? CaseFiles{directory_ + "/" + outcome.case_id}.checkpoints() : chosen->checkpoint.folder;
  const Restarter restarter(*chosen, folder);
  ProcessShare share = share_;
  int lost = 0;
  CaseOutcome result = run_decided(outcome, mode, share, lost);
  std::string history;
  for (int restart = 1; restart <= restarts_.most && lost > 0 && !interrupted_.load(); ++restart) {
    auto next = restarter.next(result.config, share, processes_of(result.config, share).value(), lost, restarts_);
    if (!next.ok()) {
      result.reason += fmt::format("; not restarted: {}; {}", next.error().message, next.error().hint);
      break;
    }
    history += fmt::format("{}{}; restarted {}", history.empty() ? "" : "; ", result.reason, next->from);
    fmt::print(stderr, "{}: {}; restart {} of {} {}\n", visible_line(case_title(*chosen)), visible_line(result.reason), restart,
               restarts_.most, next->from);
    outcome.config = std::move(next->config);
    share = next->share;
    lost = 0;
    result = run_decided(outcome, mode, share, lost);
  }
  if (!history.empty()) result.reason = history + (result.reason.empty() ? "" : "; " + result.reason);
  return result;
}

/// Of the timeline also what each op took, and its trace.
Result<void> ProcessCaseRunner::predict_into(CaseOutcome& outcome, const PlacedRun& placed, Mode mode,
                                             const std::string& directory) const {
  if (resolution_ == Resolution::kSegments) {
    const auto figures = predict_case_by_segments(outcome.config, placed);
    if (!figures.ok()) return figures.error();
    outcome.predicted = *figures;
    return {};
  }
  const auto predicted = predict_case(outcome.config, placed);
  if (!predicted.ok()) return predicted.error();
  outcome.predicted = predicted->figures;
  outcome.ops = compare_ops(placed, &predicted->trace, nullptr);
  const bool kept = traces_ == Traces::kAll || (traces_ == Traces::kMeasured && mode == Mode::kBoth);
  if (kept && outcome.config.layout.world_size() <= kTraceRanks)
    write_trace_lines(CaseFiles{directory}.predicted(), *placed.plan, placed.programs, predicted->trace);
  return {};
}

namespace {

/// Memory and wire bytes of a case whose seconds were not predicted.
Result<void> tell_bytes(CaseOutcome& outcome, const PlacedRun& placed) {
  if (outcome.predicted) return {};
  const auto bytes = predict_bytes(outcome.config, placed);
  if (!bytes.ok()) return bytes.error();
  outcome.predicted = *bytes;
  return {};
}

}  // namespace

CaseOutcome ProcessCaseRunner::run_decided(CaseOutcome outcome, Mode mode, const ProcessShare& share, int& lost) {
  const Case& config = outcome.config;
  const auto placed = prepare(config);
  if (!placed.ok()) return ended_by(std::move(outcome), placed.error());

  const CaseFiles files{directory_ + "/" + outcome.case_id};
  std::error_code failure;
  if (std::filesystem::is_symlink(files.directory, failure))
    throw WorldError(fmt::format("{} is a link: files of the case would be written elsewhere", files.directory), "remove the link");
  std::filesystem::create_directories(files.directory, failure);
  if (failure)
    throw WorldError(fmt::format("{}: {}", files.directory, failure.message()), "give the case a folder that can be made");
  // Of an earlier attempt: they would not be of the plan that is written here.
  for (const std::string& trace : {files.predicted(), files.measured(), files.chrome()}) std::filesystem::remove(trace, failure);
  write_file_atomically(files.config(), to_yaml(config));
  write_file_atomically(files.plan(), print(*placed->plan));
  if (placed->in_step) write_file_atomically(files.in_step_plan(), print(*placed->in_step->plan));
  if (placed->warm_up) write_file_atomically(files.warm_up_plan(), print(*placed->warm_up->plan));
  if (mode != Mode::kMeasure) {
    if (const auto predicted = predict_into(outcome, *placed, mode, files.directory); !predicted.ok())
      return ended_by(std::move(outcome), predicted.error());
  }
  if (const auto fit = fits(config, *placed); !fit.ok()) {
    if (const auto told = tell_bytes(outcome, *placed); !told.ok()) return ended_by(std::move(outcome), told.error());
    return ended_by(std::move(outcome), fit.error());
  }
  if (mode == Mode::kSimulate) return outcome;
  if (const auto processes = processes_of(config, share); !processes.ok()) return refused(std::move(outcome), processes.error());
  if (config.transport == TransportKind::kMpi && seats_ != nullptr && mpi_used_) {
    const Error twice{ExitCode::kUsage, "a second case over mpi in one job of a launcher, which can start MPI once",
                      "shardlab launch -n N run ..., which calls the launcher for each case (--launcher)", ""};
    return refused(std::move(outcome), twice);
  }
  if (const auto whole = check_periods(config, placed->plan->period); !whole.ok())
    return ended_by(std::move(outcome), whole.error());
  if (config.checkpoint.resume.empty())
    if (const auto timed = check_timed_steps(config, 0); !timed.ok()) return ended_by(std::move(outcome), timed.error());
  if (const auto fit = validation_fits(config, *placed); !fit.ok()) {
    if (const auto told = tell_bytes(outcome, *placed); !told.ok()) return ended_by(std::move(outcome), told.error());
    return ended_by(std::move(outcome), fit.error());
  }
  if (const auto laid_out = lay_out_replay(config, files.directory); !laid_out.ok())
    return ended_by(std::move(outcome), laid_out.error());
  if (!std::exchange(machine_written_, true)) write_file_atomically(files.machine(), to_yaml(config.machine));
  if (config.transport == TransportKind::kMpi) mpi_used_ = true;
  lost = measure(outcome, files.directory, share);
  return outcome;
}

}  // namespace shardlab::cases
