// Measured cases run in processes of their own: a crash or a hang costs one row, never the sweep.
#pragma once

#include <signal.h>

#include <atomic>
#include <string>

#include "answers/planned.h"
#include "cases/namespaces.h"
#include "plan/outcome.h"
#include "sweeps/driver.h"
#include "sweeps/resolution.h"
#include "sweeps/traces.h"

namespace shardlab::cases {

class Seats;

/// Asks a case process what its ranks are at. It writes that to `CaseFiles::picture`, and ends.
inline constexpr int kAskForPicture = SIGUSR1;
/// The environment variable with what a process must know to join its group (`Control`). Not on the command line, which others see.
inline constexpr const char* kGroupToken = "SHARDLAB_GROUP_TOKEN";

/// How the ranks of a case whose transport is between processes are shared out.
struct ProcessShare {
  int processes = 0;                ///< as many for every case; 0: as `ranks_per_process` asks
  int ranks_per_process = 0;        ///< 0: 1, where `processes` does not tell
  std::string launcher = "mpirun";  ///< what starts the processes of a case with `transport: mpi`; `-n N` follows
};
/// The number of a process of a case that its launcher gives (`measure-case --process`).
inline constexpr int kOwnNumber = -1;
/// Processes of a case; 1 where its ranks are threads. Refuses ranks that cannot be shared out evenly.
Result<int> processes_of(const Case& config, const ProcessShare& share);

/// What happens to a case of which a process was taken away: killed, stopped, or silent when it is asked what it is at. Faults of the
/// program itself, and ranks that are slow, are not repeated.
struct Restarts {
  int most = 0;          ///< attempts after the first, of each case
  bool elastic = false;  ///< lost processes are missed: the case goes on with fewer data-parallel ranks
  int least_dp = 1;      ///< with `elastic`: fewer are refused
};

/// Predicts in this process and measures in a child, leaving the files of each case under `<directory>/<case id>`.
class ProcessCaseRunner final : public CaseRunner {
 public:
  /// `program` is this executable. `interrupted` ends a running child early. `replay` is a run directory whose logs of arrivals are
  /// repeated by the cases that have any; empty: gradients are applied as they come. `resolution` has a plan.
  /// `traces` says which cases leave their traces. `seats`: the other processes of a job, which take their parts of the cases whose
  /// ranks are shared out; none: all processes of a case are started here. `restarts` is of processes that are started here.
  ProcessCaseRunner(std::string directory, std::string program, const std::atomic<bool>& interrupted, std::string replay = {},
                    Resolution resolution = Resolution::kTimeline, Traces traces = Traces::kMeasured, ProcessShare share = {},
                    Seats* seats = nullptr, Restarts restarts = {})
      : directory_(std::move(directory)),
        program_(std::move(program)),
        replay_(std::move(replay)),
        resolution_(resolution),
        traces_(traces),
        share_(share),
        seats_(seats),
        restarts_(restarts),
        interrupted_(interrupted) {}

  /// The outcome's case is the decided one: recompute by budget as the list that was chosen. Of a case that was restarted it is the last
  /// attempt, under the id of the first, and the reason tells of each restart.
  CaseOutcome run(const sweeps::Point& point, Mode mode) override;

 private:
  /// `lost`: processes that were taken away, of a measurement that failed for it; else 0.
  CaseOutcome run_decided(CaseOutcome outcome, Mode mode, const ProcessShare& share, int& lost);
  Result<void> predict_into(CaseOutcome& outcome, const PlacedRun& placed, Mode mode, const std::string& directory) const;
  Result<void> lay_out_replay(const Case& config, const std::string& directory) const;
  /// The number of processes that were taken away, as `run_decided` tells it.
  int measure(CaseOutcome& outcome, const std::string& directory, const ProcessShare& share) const;

  std::string directory_, program_, replay_;
  Resolution resolution_;
  Traces traces_;
  ProcessShare share_;
  Seats* seats_;
  Restarts restarts_;
  bool machine_written_ = false;  ///< measured cases run one at a time
  bool mpi_used_ = false;         ///< the job's launcher has started MPI for a case
  const std::atomic<bool>& interrupted_;
};

}  // namespace shardlab::cases
