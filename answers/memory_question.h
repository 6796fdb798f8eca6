// A question to `memory`: flags become a layout whose bytes are told by shardlab's plans or by the profile of a framework.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "answers/case_flags.h"
#include "answers/namespaces.h"
#include "plan/base/result.h"
#include "plan/case.h"
#include "simulator/estimator/analytic/analytic.h"
#include "simulator/estimator/analytic/goodput.h"
#include "simulator/estimator/memory/answer.h"
#include "simulator/estimator/memory/changes.h"

namespace shardlab::answers {

/// One layout to be told about.
struct MemoryQuestion {
  Case config;  ///< model, machine, batch and, of shardlab's executor, everything
  analytic::ModelShape shape;
  analytic::Point point;
  bool exact = false;                          ///< shardlab's executor runs it
  std::optional<analytic::Prepared> prepared;  ///< absent where the estimate has no form or the machine not all its rates
  std::string untimed;                         ///< why it is absent, and so nothing timed or ranked; with what to do about it
  int64_t capacity = 0;                        ///< bytes that a rank may use; 0: not known
  std::vector<std::string> notes;              ///< what was assumed in reading the question
};

/// If no profile is named, the profile is a framework's (`default_profile`) on a described machine with all rates that it needs,
/// else shardlab's own; `notes` says so. Under the profile `shardlab` the question is refused if `check(Case)` refuses. Under
/// others it is refused if the analytic estimate refuses or cannot tell the layout apart (`compression` kinds, `diloco`,
/// `parameter_server`, `zero_plus_plus`). Defaults of the framework are filled in where no flag says otherwise: bf16, zero 3 under
/// FSDP, sequence parallelism of torchtitan, interleaved if vpp is above 1.
Result<MemoryQuestion> memory_question(const CaseFlags& flags);

/// How much work an exact answer may be: the plan is built where layers times micro-batches are at most this, and else only when
/// the verdict hangs on what packing adds.
inline constexpr int64_t kPlannedLayerRuns = 256;

struct MemoryAnswerOptions {
  bool always_plan = false;
  int64_t planned_layer_runs = kPlannedLayerRuns;
  double tokens = 0;                      ///< of a whole training run; 0: not asked
  double price_usd = 0;                   ///< of one device for an hour; 0: as the machine's file lists it
  analytic::Interruptions interruptions;  ///< none where the time between failures is 0
};

/// What is asked beside the layout, in the words of flags; empty: not asked.
struct MemoryWords {
  std::string tokens, mtbf, checkpoint, restart, interval;
  double price_usd = 0;
  bool plan = false;
};
/// What interrupts the run is refused where it is not stated whole, or no run is asked for.
Result<MemoryAnswerOptions> memory_options(const MemoryWords& words);

/// A whole training run in the layout.
struct MemoryRun {
  double tokens = 0;
  analytic::RunBill bill;  ///< with what failures cost, where they were stated
  std::optional<analytic::Goodput> goodput;
  std::string price_note;  ///< empty where no price is known, and the bill then has no money
};

/// Bytes by stage and item, verdict, step time.
Result<whatif::Answer> memory_answer(const MemoryQuestion& question, const MemoryAnswerOptions& options = {});

/// Changes that would make the layout of a question fit. Empty if nothing can be timed.
whatif::Advice memory_advice(const MemoryQuestion& question);

/// Why `memory_advice` is empty: what of the machine is missing, or of the question has no estimate; and what to do about it.
std::string why_not_ranked(const MemoryQuestion& question);

/// Sentences on what the figures count and what they leave out.
std::vector<std::string> memory_assumptions(const MemoryQuestion& question, const whatif::Answer& answer);

/// A question with its answer and, where it does not fit, what to change.
struct ToldMemory {
  MemoryQuestion question;
  whatif::Answer answer;
  whatif::Advice advice;
  std::optional<MemoryRun> run;  ///< where it was asked for and the step has a time
};

/// Question and answer in one; what to change where `advise` says so and it does not fit.
Result<ToldMemory> tell_memory(const CaseFlags& flags, const MemoryAnswerOptions& options, bool advise);

/// Sets a key of the sweep file: by its flag if it has one, else as `--set`; an earlier value is replaced.
void set_word(CaseFlags& flags, const std::string& key, const std::string& value);

}  // namespace shardlab::answers
