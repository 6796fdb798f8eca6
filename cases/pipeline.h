// One case from its text to its figures: lower, predict, execute, compare. The place where plan, simulator, runtime and profiler
// meet.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "answers/planned.h"
#include "cases/namespaces.h"
#include "plan/base/result.h"
#include "plan/case.h"
#include "plan/outcome.h"
#include "plan/trace.h"
#include "runtime/session.h"
#include "simulator/interpreter/predict.h"

namespace shardlab::cases {

/// Part of every file that is kept for validation.
inline constexpr double kValidationFraction = 0.1;

/// This machine, its runs and stderr.
Surroundings surroundings();

/// `answers::decide` here, where runs can be read: see there.
Result<Case> decide(const Case& config);

/// Whether a measurement of the case ends with the loss on the validation split.
bool validates(const Case& config);

/// Refuses a number of validation sequences that no whole number of steps takes, or that the split, of `available`, does not have.
Result<void> check_validation(const Case& config, int64_t available);

/// Refuses warm-up or measured steps that are no whole periods of `period` steps.
Result<void> check_periods(const Case& config, int period);

/// Refuses timed steps in both phases of a run that begins with step `first`: their times and bytes would be no one step's.
Result<void> check_timed_steps(const Case& config, int64_t first);

/// The simulator's figures and trace for the case on its machine.
Result<Predicted> predict_case(const Case& config, const PlacedRun& placed);

/// Predicts the same figures from the timeline by segments, which has no trace. Refuses a local machine, whose ranks share cores.
Result<Prediction> predict_case_by_segments(const Case& config, const PlacedRun& placed);

/// Predicts memory, wire bytes and the imbalance of experts alone, for a case on a machine whose speed nobody knows.
Result<Prediction> predict_bytes(const Case& config, const PlacedRun& placed);

/// `outcome` of a case that got no further than `error`, with its message and hint as the reason.
CaseOutcome refused(CaseOutcome outcome, const Error& error, Status status = Status::kRefused);

/// The results of an execution.
struct Executed {
  Measurement figures;
  Trace trace;              ///< of the measured steps
  std::string first_fault;  ///< why the first update was left out, where one was and the guard knows
};

/// Trains the case as its `measure` block says, in this process: warm-up steps, then `repeat` blocks of `steps` steps, all of one
/// training run, which begins where the checkpoint that it resumes ends. Saves in `checkpoint.folder`. Throws WorldError when a
/// rank fails, a wait times out or a checkpoint cannot be written.
/// What is offloaded to NVMe is kept in unnamed files in `directory`, where a parameter server with a staleness leaves the logs of
/// its arrivals. The first phase of a run of two, which lies in the warm-up, has a session of its own, whose state the next takes
/// over.
/// `watch`, where one is given, is told what the run is at. `control`: the processes that the ranks are shared out to, each of
/// which executes the case; all get the same. Refuses, before the first step, processes that differ in plan, program, kernels or
/// data.
Result<Executed> execute_case(const Case& config, const PlacedRun& placed, const std::string& directory, Watch* watch = nullptr,
                              Control* control = nullptr);

/// Predicted and measured seconds by op label and stage, for one step of one rank. Either trace may be null.
std::vector<OpComparison> compare_ops(const PlacedPlan& placed, const Trace* predicted, const Trace* measured);

/// Files of a case in a run directory.
struct CaseFiles {
  std::string directory;
  std::string config() const { return directory + "/case.yaml"; }
  std::string machine() const { return directory + "/../machine.yaml"; }  ///< one for all cases
  std::string plan() const { return directory + "/plan.txt"; }
  std::string warm_up_plan() const { return directory + "/plan.warm-up.txt"; }  ///< of a run of two phases
  std::string in_step_plan() const { return directory + "/plan.in-step.txt"; }  ///< with post_validation: of steps made again
  std::string outcome() const { return directory + "/outcome.sqlite"; }
  std::string predicted() const { return directory + "/predicted.trace.jsonl.gz"; }
  std::string measured() const { return directory + "/measured.trace.jsonl.gz"; }
  std::string chrome() const { return directory + "/trace.json.gz"; }
  std::string routes() const { return directory + "/routes.txt"; }        ///< rows of experts in the last measured step
  std::string loads() const { return directory + "/loads.txt"; }          ///< rows of experts in all measured steps, as routes.txt
  std::string checkpoints() const { return directory + "/checkpoints"; }  ///< where the case names no other folder
  std::string log(int process = 0) const {                                ///< of each process, where a case has several
    return directory + (process == 0 ? "/log.txt" : "/log." + std::to_string(process) + ".txt");
  }
  std::string picture() const { return directory + "/timeout.txt"; }  ///< what a case was at that took too long
  /// Of a parameter server with a staleness: the order in which gradients came, and the order in which they are to come.
  std::string arrivals(int server) const { return directory + "/arrivals." + std::to_string(server) + ".txt"; }
  std::string replay(int server) const { return directory + "/replay." + std::to_string(server) + ".txt"; }
};

}  // namespace shardlab::cases
