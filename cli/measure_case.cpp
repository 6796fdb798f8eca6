// measure-case DIRECTORY: what the child process of a measured case runs. Not for people: hidden from the help.
#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <thread>
#include <utility>

#include "cli/case_process.h"
#include "cli/common.h"
#include "cli/namespaces.h"
#include "cli/pipeline.h"
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

 private:
  [[noreturn]] void answer() {
    sigset_t asked;
    sigemptyset(&asked);
    sigaddset(&asked, kAskForPicture);
    int signal = 0;
    sigwait(&asked, &signal);
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
  Watch watch_;
};

Result<ExitCode> measure_case(const std::string& directory, bool traces) {
  const CaseFiles files{directory};
  Watch& watch = (new CaseWatch(files.picture()))->watch();  // never deleted: its thread ends with the process
  watch.begin("lowers the plan");
  auto config = load_case(files.config(), load_options(files.machine()));
  if (!config.ok()) return config.error();
  const auto placed = prepare(*config);
  if (!placed.ok()) return placed.error();
  Case training = *config;
  if (training.checkpoint.save_every > 0 && training.checkpoint.folder.empty()) training.checkpoint.folder = files.checkpoints();
  watch.begin("trains");
  auto executed = execute_case(training, *placed, directory, &watch);
  if (!executed.ok()) return executed.error();

  CaseOutcome outcome;
  outcome.case_id = case_id(*config);
  outcome.config = *config;
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
  watch.begin("has trained, and compares the ops");
  const auto predicted = predict_case(*config, *placed);
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
  verb->callback(
      [&action, directory, untraced] { action = [directory, untraced] { return measure_case(*directory, !*untraced); }; });
}

}  // namespace shardlab::cli
