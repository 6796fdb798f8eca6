// Runs the points of a sweep in order: one outcome a point, saved as soon as it is there.
#pragma once

#include <atomic>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "plan/interfaces.h"
#include "plan/outcome.h"
#include "sweeps/sweep.h"

namespace shardlab::sweeps {

/// Simulates and measures one case. Implemented where simulator and runtime meet (cli).
class CaseRunner {
 public:
  virtual ~CaseRunner() = default;
  /// Called for points that are not refused. Must be safe to call from several threads when `mode` is simulate and
  /// DriveOptions::jobs is above 1. A WorldError thrown here costs this case only.
  virtual CaseOutcome run(const Point& point, Mode mode) = 0;
};

/// The interface that keeps outcomes. Called from one thread only.
class ResultSink {
 public:
  virtual ~ResultSink() = default;
  /// The outcome stored for this case by this version of the program, if there is one, as it was appended.
  virtual std::optional<CaseOutcome> recorded(std::string_view case_id, std::string_view program_version) const = 0;
  /// Saves one outcome for good. A WorldError (disk full) ends the sweep.
  virtual void append(const CaseOutcome& outcome) = 0;
};

/// Counts so far. `done` is the sum of the statuses and of `skipped`.
struct Progress {
  int64_t total = 0;
  int64_t done = 0;
  int64_t skipped = 0;  ///< by --resume
  int64_t ok = 0, refused = 0, oom = 0, timeout = 0, failed = 0;
  double elapsed_s = 0;
  std::optional<double> remaining_s;  ///< cases left times the mean seconds of the finished ones; none until one has finished
};

/// Told what happens, for a person to read. Called from one thread only.
class ProgressSink {
 public:
  virtual ~ProgressSink() = default;
  /// With several jobs, a case may be announced after it began, in the order of the sweep.
  virtual void started(const Point& point, const Progress& progress) = 0;
  virtual void finished(const CaseOutcome& outcome, const Progress& progress) = 0;
};

struct DriveOptions {
  Mode mode = Mode::kBoth;
  bool resume = false;  ///< skip what the same build (`program_version`) finished and stored, with all that `mode` asks for
  std::string program_version;
  int jobs = 1;                                    ///< cases at once; simulate only, since measured cases would disturb one another
  const std::atomic<bool>* interrupted = nullptr;  ///< checked between cases
  /// Told of every outcome, in order; true ends the drive. Absent: every point is run.
  std::function<bool(const CaseOutcome&)> enough;
};

struct DriveSummary {
  Progress progress;
  bool interrupted = false;
  /// 0 when every runnable case is ok, 4 when one failed, timed out or ran out of memory in measurement, 3 when none could run,
  /// 130 when interrupted.
  ExitCode exit = ExitCode::kDone;
};

/// Refuses options that contradict one another.
Result<void> check(const DriveOptions& options);

/// Runs all points in the given order and appends their outcomes in that order. Refuses when the sink refuses (environment), or
/// when options contradict one another.
Result<DriveSummary> drive(std::span<const Point> points, CaseRunner& runner, ResultSink& sink, ProgressSink& progress,
                           const Clock& clock, const DriveOptions& options);

}  // namespace shardlab::sweeps
