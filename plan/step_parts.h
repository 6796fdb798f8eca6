// The seconds of one step by what they were spent on: compute, communication, waits, and time that no plan has. The parts add up to the step.
#pragma once

#include <array>
#include <string_view>
#include <vector>

namespace shardlab {

/// Seconds of a step on one rank. Every moment counts once, for the first part of this order that claims it. All 0: not known.
struct StepParts {
  double compute_s = 0;    ///< forward and backward
  double recompute_s = 0;  ///< forward again, within backward
  double update_s = 0;     ///< ops of no micro-batch: optimizer, clipping, casts, the mean of the loss
  /// Exposed communication, by what it serves: nothing runs beside it. Waits for peers are no part of it.
  double tensor_s = 0;         ///< tensor and sequence parallelism
  double context_s = 0;        ///< context parallelism
  double expert_s = 0;         ///< expert parallelism
  double data_s = 0;           ///< gradients and weights of data-parallel ranks
  double pipeline_s = 0;       ///< messages between stages
  double communication_s = 0;  ///< exposed communication of an unknown purpose
  double copies_s = 0;         ///< copies between memory spaces, with nothing beside them
  double bubble_s = 0;         ///< compute waits for the input of its stage, which the sender has not begun to send
  double wait_s = 0;           ///< an op waits for a peer or for another stream
  double launch_s = 0;         ///< the device waits for the host, or takes its time to begin
  double unplanned_s = 0;      ///< in no op and no wait
  double total() const;
  friend bool operator==(const StepParts&, const StepParts&) = default;
};

/// A part by its stable name: "compute", "tensor".
struct StepPartField {
  std::string_view name;
  double StepParts::*seconds;
};
inline constexpr std::array<StepPartField, 14> kStepParts{{{"compute", &StepParts::compute_s},
                                                           {"recompute", &StepParts::recompute_s},
                                                           {"update", &StepParts::update_s},
                                                           {"tensor", &StepParts::tensor_s},
                                                           {"context", &StepParts::context_s},
                                                           {"expert", &StepParts::expert_s},
                                                           {"data", &StepParts::data_s},
                                                           {"pipeline", &StepParts::pipeline_s},
                                                           {"communication", &StepParts::communication_s},
                                                           {"copies", &StepParts::copies_s},
                                                           {"bubble", &StepParts::bubble_s},
                                                           {"wait", &StepParts::wait_s},
                                                           {"launch", &StepParts::launch_s},
                                                           {"unplanned", &StepParts::unplanned_s}}};

inline double StepParts::total() const {
  double sum = 0;
  for (const StepPartField& part : kStepParts) sum += this->*part.seconds;
  return sum;
}

/// `parts` times `factor`.
inline StepParts scaled(StepParts parts, double factor) {
  for (const StepPartField& part : kStepParts) parts.*part.seconds *= factor;
  return parts;
}

struct Plan;
struct Program;
struct Trace;

/// The parts of one step on one rank: they add up to the rank's step interval. `programs` are indexed by role.
StepParts parts_of_step(const Plan& plan, const std::vector<Program>& programs, const Trace& trace, int rank, int step);

}  // namespace shardlab
