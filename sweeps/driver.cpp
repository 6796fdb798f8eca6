#include "sweeps/driver.h"

#include <fmt/format.h>

#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "plan/base/world_error.h"
#include "plan/reasons.h"

namespace shardlab::sweeps {

namespace {

/// Need a point with this recorded outcome not be run again? One that is ok lacks nothing that `mode` asks for. What was refused
/// while it ran is asked again: the machine may have been calibrated since.
bool is_final(const CaseOutcome& recorded, const Point& point, Mode mode) {
  if (recorded.status == Status::kRefused) return point.refusal.has_value();
  if (recorded.status == Status::kOom) return true;
  return recorded.status == Status::kOk && (mode == Mode::kMeasure || recorded.predicted) &&
         (mode == Mode::kSimulate || recorded.measured);
}

/// Over the budget by prediction, so that nobody tried: no failure, as a case that ran out of memory while it was measured is.
bool predicted_oom(const CaseOutcome& outcome, const Case& config, Mode mode) {
  if (outcome.status != Status::kOom) return false;
  if (mode == Mode::kSimulate) return true;
  return outcome.predicted && std::max(outcome.predicted->arena_bytes, outcome.predicted->peak_bytes) > memory_per_rank(config);
}

CaseOutcome outcome_of(const Point& point, Status status, std::string reason) {
  CaseOutcome outcome;
  outcome.case_id = point.id;
  outcome.config = point.config;
  outcome.status = status;
  outcome.reason = std::move(reason);
  if (check(point.config.model).ok()) outcome.parameters = parameter_count(point.config.model);
  return outcome;
}

/// One case, whatever happens to it: the boundary where the world's failures end.
CaseOutcome run_point(const Point& point, CaseRunner& runner, Mode mode) {
  try {
    CaseOutcome outcome = runner.run(point, mode);
    outcome.case_id = point.id;
    return outcome;
  } catch (const WorldError& e) {
    return outcome_of(point, Status::kFailed,
                      e.hint().empty() ? std::string(e.what()) : fmt::format("{} ({})", e.what(), e.hint()));
  } catch (const std::exception& e) {  // the standard library's: of files, of memory; whatever it is, it costs this row alone
    return outcome_of(point, Status::kFailed, e.what());
  }
}

/// Outcomes of the points to run, in their order: made on the caller's thread, or ahead of it by `jobs` workers.
class Outcomes {
 public:
  Outcomes(std::vector<const Point*> todo, CaseRunner& runner, const DriveOptions& options)
      : todo_(std::move(todo)), runner_(runner), mode_(options.mode), interrupted_(options.interrupted) {
    if (options.jobs > 1) {
      ahead_ = 4 * static_cast<size_t>(options.jobs);
      for (int i = 0; i < options.jobs; ++i) workers_.emplace_back([this] { work(); });
    }
  }
  ~Outcomes() {
    {
      const std::lock_guard lock(mutex_);
      stopped_ = true;
    }
    changed_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }
  Outcomes(const Outcomes&) = delete;
  Outcomes& operator=(const Outcomes&) = delete;

  /// The outcome of the next point; nothing when interrupted before it began.
  std::optional<CaseOutcome> next() {
    if (workers_.empty()) {
      if (interrupted()) return std::nullopt;
      return run_point(*todo_[taken_++], runner_, mode_);
    }
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_.contains(taken_) || (closed_ && taken_ >= begun_); });
    const auto it = done_.find(taken_);
    if (it == done_.end()) return std::nullopt;
    CaseOutcome outcome = std::move(it->second);
    done_.erase(it);
    ++taken_;
    changed_.notify_all();
    return outcome;
  }

 private:
  bool interrupted() const { return interrupted_ && interrupted_->load(); }

  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return stopped_ || begun_ < taken_ + ahead_ || begun_ >= todo_.size(); });
      if (stopped_ || begun_ >= todo_.size()) return;
      if (interrupted()) {
        closed_ = true;
        changed_.notify_all();
        return;
      }
      const size_t mine = begun_++;
      lock.unlock();
      CaseOutcome outcome = run_point(*todo_[mine], runner_, mode_);
      lock.lock();
      done_.emplace(mine, std::move(outcome));
      changed_.notify_all();
    }
  }

  const std::vector<const Point*> todo_;
  CaseRunner& runner_;
  const Mode mode_;
  const std::atomic<bool>* interrupted_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<size_t, CaseOutcome> done_;  ///< finished, not taken yet
  size_t begun_ = 0, taken_ = 0, ahead_ = 0;
  bool closed_ = false;   ///< interrupted: nothing more will begin
  bool stopped_ = false;  ///< nobody will take any more
  std::vector<std::thread> workers_;
};

/// The counts of one sweep.
class Tally {
 public:
  Tally(const Clock& clock, int64_t total, int64_t to_run) : clock_(clock), begin_(clock.now()), to_run_(to_run) {
    progress_.total = total;
  }

  void add(const CaseOutcome& outcome, const Case& config, Mode mode) {
    switch (outcome.status) {
      case Status::kOk: ++progress_.ok; break;
      case Status::kRefused: ++progress_.refused; break;
      case Status::kOom: ++progress_.oom; break;
      case Status::kTimeout: ++progress_.timeout; break;
      case Status::kFailed: ++progress_.failed; break;
    }
    if (outcome.status == Status::kOk) ++good_;
    const bool could_not_run = outcome.status == Status::kRefused || predicted_oom(outcome, config, mode);
    if (outcome.status != Status::kOk && !could_not_run) ++bad_;
    ++progress_.done;
  }
  /// A case recorded before: counted with its status for the exit code, and as skipped.
  void skip(const CaseOutcome& recorded, const Case& config, Mode mode) {
    add(recorded, config, mode);
    ++progress_.skipped;
  }
  void began() {
    if (run_ == 0) run_begin_ = clock_.now();
  }
  void ran() { ++run_; }

  Progress progress() const {
    Progress p = progress_;
    const double now = clock_.now();
    p.elapsed_s = now - begin_;
    if (run_ > 0) p.remaining_s = (now - run_begin_) / static_cast<double>(run_) * static_cast<double>(to_run_ - run_);
    return p;
  }

  DriveSummary summary(bool interrupted) const {
    DriveSummary summary;
    summary.progress = progress();
    summary.interrupted = interrupted;
    summary.exit = interrupted ? ExitCode::kInterrupted : exit_code();
    return summary;
  }

 private:
  ExitCode exit_code() const {
    if (bad_ > 0) return ExitCode::kSomeFailed;
    return good_ > 0 ? ExitCode::kDone : ExitCode::kNo;
  }

  const Clock& clock_;
  double begin_, run_begin_ = 0;
  Progress progress_;
  int64_t to_run_, run_ = 0;
  int64_t good_ = 0, bad_ = 0;
};

/// The recorded outcome of a point that need not be run again.
std::optional<CaseOutcome> finished_before(const Point& point, const ResultSink& sink, const DriveOptions& options) {
  if (!options.resume) return std::nullopt;
  auto recorded = sink.recorded(point.id, options.program_version);
  if (recorded && is_final(*recorded, point, options.mode)) return recorded;
  return std::nullopt;
}

/// Copies the half that a resumed run need not lose: the prediction of a case that is now only measured, or the other way round.
void keep_other_half(CaseOutcome& outcome, const Point& point, const ResultSink& sink, const DriveOptions& options) {
  if (!options.resume || outcome.status != Status::kOk || (outcome.predicted && outcome.measured)) return;
  auto recorded = sink.recorded(point.id, options.program_version);
  if (!recorded || recorded->status != Status::kOk) return;
  if (!outcome.predicted) outcome.predicted = std::move(recorded->predicted);
  if (outcome.measured || !recorded->measured) return;
  outcome.measured = std::move(recorded->measured);
  outcome.ops = std::move(recorded->ops);
}

}  // namespace

Result<void> check(const DriveOptions& options) {
  if (options.jobs < 1)
    return Error{ExitCode::kUsage, fmt::format("jobs={} is not positive", options.jobs), "use --jobs 1 or more", {}};
  if (options.jobs > 1 && options.mode != Mode::kSimulate)
    return Error{
        ExitCode::kUsage,
        fmt::format("jobs={} with mode {}: cases measured at once would disturb one another", options.jobs, name_of(options.mode)),
        "use --jobs 1, or --mode simulate",
        {}};
  return {};
}

Result<DriveSummary> drive(std::span<const Point> points, CaseRunner& runner, ResultSink& sink, ProgressSink& progress,
                           const Clock& clock, const DriveOptions& options) {
  SHARDLAB_TRY(check(options));
  try {
    std::vector<std::optional<CaseOutcome>> before;
    std::vector<const Point*> todo;
    for (const Point& point : points) {
      before.push_back(finished_before(point, sink, options));
      if (!before.back() && !point.refusal) todo.push_back(&point);
    }
    Tally tally(clock, static_cast<int64_t>(points.size()), static_cast<int64_t>(todo.size()));
    Outcomes outcomes(std::move(todo), runner, options);
    for (size_t i = 0; i < points.size(); ++i) {
      const Point& point = points[i];
      if (before[i]) {
        tally.skip(*before[i], point.config, options.mode);
        if (options.enough && options.enough(*before[i])) break;
        continue;
      }
      if (options.interrupted && options.interrupted->load() && options.jobs == 1) return tally.summary(true);
      std::optional<CaseOutcome> outcome;
      if (point.refusal) {
        outcome = outcome_of(point, Status::kRefused, reason_of(*point.refusal));
      } else {
        tally.began();
        progress.started(point, tally.progress());
        outcome = outcomes.next();
        if (!outcome) return tally.summary(true);
        if (options.interrupted && options.interrupted->load() && outcome->status == Status::kFailed)
          return tally.summary(true);  // ended by us, not by itself: --resume runs it again
        keep_other_half(*outcome, point, sink, options);
        tally.ran();
      }
      if (outcome->program_version.empty()) outcome->program_version = options.program_version;
      sink.append(*outcome);
      tally.add(*outcome, point.config, options.mode);
      progress.finished(*outcome, tally.progress());
      if (options.enough && options.enough(*outcome)) break;
    }
    return tally.summary(false);
  } catch (const WorldError& e) {
    // Runs end in outcomes: what arrives here is the sink's. Results that cannot be kept are not worth making.
    return Error{ExitCode::kEnvironment, e.what(), e.hint(), {}};
  }
}

}  // namespace shardlab::sweeps
