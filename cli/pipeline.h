// One case from its text to its figures: lower, predict, execute, compare. The place where plan, simulator, runtime and profiler
// meet.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "plan/base/result.h"
#include "plan/case.h"
#include "plan/outcome.h"
#include "plan/trace.h"
#include "runtime/session.h"
#include "simulator/predict.h"

namespace shardlab {

/// Part of every file that is kept for validation.
inline constexpr double kValidationFraction = 0.1;

/// Bytes of one rank in a space, where somebody stated them: the device's (`memory_per_rank`), or its part of what its node has by
/// the machine's constants "host.memory_bytes" and "nvme.capacity_bytes". 0: not known.
int64_t capacity_per_rank(const Case& config, Space space);

/// The case with what is left to choose chosen: recompute by budget becomes a list by layer, by the costs of the case's machine.
/// Refuses a budget that no choice stays within, and one on a machine whose speed nobody knows.
Result<Case> decide(const Case& config);

/// Lowers and verifies a case, expands and places its programs. The case must be decided. The budget is not asked: see `fits`.
Result<PlacedPlan> prepare(const Case& config);

/// Whether a measurement of the case ends with the loss on the validation split.
bool validates(const Case& config);

/// As `prepare`, of the forward-only step that scores the validation split after training, in an arena beside that of training.
Result<PlacedPlan> prepare_validation(const Case& config);

/// Refuses a number of validation sequences that no whole number of steps takes, or that the split, of `available`, does not have.
Result<void> check_validation(const Case& config, int64_t available);

/// Arena bytes of the rank that needs most of a space.
int64_t largest_arena(const PlacedPlan& placed, Space space = Space::kDevice);

/// Refuses with ExitCode::kNo when the largest arena of a space, or the arenas of both steps where the validation step is given,
/// exceed what a rank may use of it.
Result<void> fits(const Case& config, const PlacedPlan& placed, const PlacedPlan* validation = nullptr);

/// The simulator's figures and trace for the case on its machine.
Result<Predicted> predict_case(const Case& config, const PlacedPlan& placed);

/// Memory and wire bytes alone: what can be said of a case on a machine whose speed nobody knows.
Prediction predict_bytes(const PlacedPlan& placed);

/// What an execution gave.
struct Executed {
  Measurement figures;
  Trace trace;  ///< of the measured steps
};

/// Trains the case as its `measure` block says, in this process: warm-up steps, then `repeat` blocks of `steps` steps, all of one
/// training run, which begins where the checkpoint that it resumes ends. Saves in `checkpoint.folder`. Throws WorldError when a
/// rank fails, a wait times out or a checkpoint cannot be written.
/// What is offloaded to NVMe is kept in unnamed files in `directory`, where a parameter server with a staleness leaves the logs of
/// its arrivals.
Result<Executed> execute_case(const Case& config, const PlacedPlan& placed, const std::string& directory);

/// The step of a trace whose duration is the median, alone: what is kept on disk, since all steps of a run fill it quickly.
Trace median_step(const Trace& trace);

/// Predicted and measured seconds by op label and stage, for one step of one rank. Either trace may be null.
std::vector<OpComparison> compare_ops(const PlacedPlan& placed, const Trace* predicted, const Trace* measured);

/// Files of a case in a run directory.
struct CaseFiles {
  std::string directory;
  std::string config() const { return directory + "/case.yaml"; }
  std::string machine() const { return directory + "/../machine.yaml"; }  ///< one for all cases
  std::string plan() const { return directory + "/plan.txt"; }
  std::string outcome() const { return directory + "/outcome.sqlite"; }
  std::string predicted() const { return directory + "/predicted.trace.jsonl"; }
  std::string measured() const { return directory + "/measured.trace.jsonl"; }
  std::string chrome() const { return directory + "/trace.json"; }
  std::string checkpoints() const { return directory + "/checkpoints"; }  ///< where the case names no other folder
  std::string log() const { return directory + "/log.txt"; }
  /// Of a parameter server with a staleness: the order in which gradients came, and the order in which they are to come.
  std::string arrivals(int server) const { return directory + "/arrivals." + std::to_string(server) + ".txt"; }
  std::string replay(int server) const { return directory + "/replay." + std::to_string(server) + ".txt"; }
};

}  // namespace shardlab
