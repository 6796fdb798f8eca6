// measure-case DIRECTORY: what the child process of a measured case runs. Not for people: hidden from the help.
#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <string>
#include <thread>
#include <utility>

#include "cases/case_process.h"
#include "cases/job_place.h"
#include "cases/pipeline.h"
#include "cli/common.h"
#include "cli/namespaces.h"
#include "cli/verbs.h"
#include "plan/base/pending_file.h"
#include "plan/base/world_error.h"
#include "plan/trace_steps.h"
#include "profiler/trace_file.h"
#include "reports/format.h"
#include "reports/store.h"

namespace shardlab::cli {
namespace {

/// Answers `kAskForPicture` from a thread of its own, whatever the others do, and ends the process. Lives as long as that.
class CaseWatch {
 public:
  explicit CaseWatch(std::string path) : path_(std::move(path)) {
    std::thread([this] { answer(); }).detach();
  }
  Watch& watch() { return watch_; }

  /// Returns at once unless somebody has asked: then the answer ends the process. A process whose ranks give up while the answer is
  /// written would end without one.
  void let_answer() const {
    while (asked_.load()) ::pause();
  }

 private:
  [[noreturn]] void answer() {
    sigset_t asked;
    sigemptyset(&asked);
    sigaddset(&asked, kAskForPicture);
    int signal = 0;
    sigwait(&asked, &signal);
    asked_ = true;
    constexpr double kLook_s = 0.5;
    const std::string picture = watch_.picture(kLook_s);
    try {
      write_file_atomically(path_, picture);
    } catch (const WorldError&) {  // the log says it all the same
    }
    fmt::print(stderr, "{}\n", picture);
    _exit(static_cast<int>(ExitCode::kSomeFailed));
  }

  const std::string path_;
  std::atomic<bool> asked_ = false;
  Watch watch_;
};

/// Whichever way a case ends, an answer that was asked for comes first.
struct AnswersFirst {
  const CaseWatch& watch;
  ~AnswersFirst() { watch.let_answer(); }
};

/// Where a process of a group finds the others; none: all ranks are in this one.
struct GroupFlags {
  std::string server;
  int process = 0, processes = 1;
};

Result<ExitCode> measure(const Case& config, const std::string& directory, bool traces, Watch& watch, Control* control);

/// What ends this process ends the group, in its words.
Result<ExitCode> measure_in_group(const Case& config, const std::string& directory, bool traces, Watch& watch,
                                  const GroupFlags& group) {
  const auto server = parse_endpoint(group.server);
  if (!server.ok()) return server.error();
  int process = group.process;
  if (process == kOwnNumber) {
    const auto place = find_job_place({}, process_environment());
    if (!place.ok()) return place.error();
    if (!*place || (*place)->world_size != group.processes)
      return refusal(fmt::format("the launcher has started {} processes of {}", *place ? (*place)->world_size : 0, group.processes),
                     "name a launcher of MPI that starts as many as -n says: --launcher");
    process = (*place)->rank;
  }
  const char* token = std::getenv(kGroupToken);
  Control control(*server, token == nullptr ? "" : token, process, group.processes, config.measure.timeout_s);
  try {
    auto measured = measure(config, directory, traces, watch, &control);
    if (!measured.ok()) control.fail(measured.error().message, measured.error().hint);
    return measured;
  } catch (const WorldError& failure) {
    control.fail(failure.what(), failure.hint());
    throw;
  } catch (const std::exception& failure) {
    control.fail(failure.what());
    throw;
  }
}

Result<ExitCode> measure_case(const std::string& directory, bool traces, const GroupFlags& group) {
  const CaseFiles files{directory};
  CaseWatch& answers = *new CaseWatch(files.picture());  // never deleted: its thread ends with the process
  const AnswersFirst first{answers};
  Watch& watch = answers.watch();
  watch.begin("lowers the plan");
  const auto config = load_case(files.config(), load_options(files.machine()));
  if (!config.ok()) return config.error();
  if (group.server.empty()) return measure(*config, directory, traces, watch, nullptr);
  return measure_in_group(*config, directory, traces, watch, group);
}

Result<ExitCode> measure(const Case& config, const std::string& directory, bool traces, Watch& watch, Control* control) {
  const CaseFiles files{directory};
  const auto placed = prepare(config);
  if (!placed.ok()) return placed.error();
  Case training = config;
  if (training.checkpoint.save_every > 0 && training.checkpoint.folder.empty()) training.checkpoint.folder = files.checkpoints();
  watch.begin("trains");
  auto executed = execute_case(training, *placed, directory, &watch, control);
  if (!executed.ok()) return executed.error();
  if (control != nullptr && control->process() > 0) return ExitCode::kDone;  // the first process says it for all

  CaseOutcome outcome;
  outcome.case_id = case_id(config);
  outcome.config = config;
  outcome.measured = std::move(executed->figures);
  const auto& losses = outcome.measured->losses;
  const auto broken = std::ranges::find_if(losses, [](double loss) { return !std::isfinite(loss); });
  if (broken != losses.end()) {
    outcome.status = Status::kFailed;
    outcome.reason = fmt::format("the loss is {} at step {}: lower learning_rate.peak, or raise its warmup_steps",
                                 number_text(*broken), broken - losses.begin());
  }
  if (const int64_t skipped = outcome.measured->skipped_steps; skipped > 0)
    outcome.reason += fmt::format("{}{} of {} updates were left out{}", outcome.reason.empty() ? "" : "; ", skipped, losses.size(),
                                  executed->first_fault.empty() ? "" : ", the first at " + executed->first_fault);
  if (const int64_t again = outcome.measured->rolled_back_steps; again > 0)
    outcome.reason +=
        fmt::format("{}{} of {} steps were taken back and made again", outcome.reason.empty() ? "" : "; ", again, losses.size());
  if (const int64_t again = outcome.measured->expert_reruns; again > 0)
    outcome.reason += fmt::format("{}{}", outcome.reason.empty() ? "" : "; ", rerun_text(config, *outcome.measured));
  watch.begin("has trained, and compares the ops");
  const auto predicted = predict_case(config, *placed);
  outcome.ops = compare_ops(*placed, predicted.ok() ? &predicted->trace : nullptr, &executed->trace);
  if (traces) {
    // One step: all of a run fill a disk quickly.
    const Trace step = only_step(executed->trace, median_step(executed->trace));
    write_trace_lines(files.measured(), *placed->plan, placed->programs, step);
    write_chrome_trace(files.chrome(), *placed->plan, placed->programs, step);
  }
  auto store = Store::open(files.outcome());
  if (!store.ok()) return store.error();
  store->append(outcome);
  return ExitCode::kDone;
}

}  // namespace

void add_measure_case(CLI::App& app, Action& action, const Invocation&) {
  auto* verb = app.add_subcommand("measure-case", "runs one measured case; started by `run`")->group("");
  auto directory = std::make_shared<std::string>();
  verb->add_option("directory", *directory)->required();
  auto untraced = std::make_shared<bool>(false);
  verb->add_flag("--no-traces", *untraced);
  auto group = std::make_shared<GroupFlags>();
  verb->add_option("--group", group->server);
  verb->add_option("--process", group->process);
  verb->add_option("--processes", group->processes);
  verb->callback([&action, directory, untraced, group] {
    action = [directory, untraced, group] { return measure_case(*directory, !*untraced, *group); };
  });
}

}  // namespace shardlab::cli
