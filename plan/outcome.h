// The results of one case: a row of results.csv, as a struct.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "plan/case.h"
#include "plan/idle.h"
#include "plan/memory.h"
#include "plan/step_parts.h"

namespace shardlab {

enum class Status : uint8_t { kOk, kRefused, kOom, kTimeout, kFailed };
std::string_view name_of(Status s);

/// What a rank of a pipeline stage needs of its own device, on a machine of several kinds.
struct StageNeed {
  std::string device;          ///< "h100-sxm5-80gb"; several kinds of one stage are joined by " + "
  int64_t layers = 0;          ///< of the model
  int64_t peak_bytes = 0;      ///< live, at the stage's peak
  int64_t arena_bytes = 0;     ///< as the peak is packed; the peak itself where nobody packed it
  int64_t capacity_bytes = 0;  ///< of the smallest device of the stage; 0: not known
  friend bool operator==(const StageNeed&, const StageNeed&) = default;
  bool fits() const { return capacity_bytes <= 0 || std::max(peak_bytes, arena_bytes) <= capacity_bytes; }
};

/// Figures of the simulator. `peak_bytes` is the largest over ranks (device space), `wire_bytes` the sum over ranks per step.
struct Prediction {
  double step_s = 0;     ///< 0 where only memory and wire bytes are predicted
  double compute_s = 0;  ///< of the rank with the longest step, as the five fields below
  double exposed_comm_s = 0;
  double exposed_copy_s = 0;  ///< copies between memory spaces, as `Breakdown` has them
  double bubble_fraction = 0;
  IdleBreakdown idle;
  StepParts parts;  ///< of the same rank; they add up to `step_s`; not known at the resolution segments
  int64_t peak_bytes = 0;
  int64_t arena_bytes = 0;
  int64_t wire_bytes = 0;
  MemoryByClass memory;       ///< at the peak, of the rank with the peak
  MemoryByClass host_memory;  ///< the same in host memory, at its own peak
  MemoryByClass nvme_memory;  ///< and on NVMe
  bool extrapolated = false;  ///< some op lies outside what the calibration measured
  std::string calibration_id;
  /// Flops of a step that MFU counts, if they do not follow from the case: for a model that no case holds, and for adapters.
  std::optional<double> model_flops;
  /// Rows of the fullest expert over the mean, and of the fullest rank where ranks share experts, as `Measurement` has them: of the
  /// routing that the case names (plan/routing.h). None without experts.
  std::optional<double> expert_imbalance, expert_rank_imbalance;
  /// `expert_rank_imbalance` of the same rows if experts were contiguous; none where they are.
  std::optional<double> expert_rank_imbalance_contiguous;
  /// As `Measurement` has it, for the rows that are drawn; 1 for even routes. None if routes are not even and no rows are drawn.
  std::optional<double> expert_rank_imbalance_peak;
  /// Share of the steps that run again (expert_bound): 1 where drawn rows exceed the bound, and seconds are those of both runs. None without a
  /// bound, and where `expert_rank_imbalance_peak` is not known.
  std::optional<double> expert_reruns;
  /// Bytes of rows that the ranks which share experts send each other in a step, over all ranks. None where nobody shares experts.
  std::optional<int64_t> expert_exchange_bytes;
  std::vector<StageNeed> stages;  ///< of a mixed machine, by stage; else empty: `peak_bytes` is of the fullest stage
};

/// A part of some memory, and the name of what takes it.
struct MemoryItem {
  std::string name;
  int64_t bytes = 0;
  friend bool operator==(const MemoryItem&, const MemoryItem&) = default;
};

/// Figures of an execution. Times are medians over `samples` steps of all repeats; spread is (p90 - p10) / median.
struct Measurement {
  double step_s = 0;
  double step_spread = 0;
  int samples = 0;
  int repeats = 0;
  double compute_s = 0;
  double exposed_comm_s = 0;
  double exposed_copy_s = 0;
  double bubble_fraction = 0;
  double unplanned_time_s = 0;
  IdleBreakdown idle;      ///< means over the recorded steps, of the rank whose step was longest
  StepParts parts;         ///< of the same steps and ranks, as shares of `step_s`, to which they add up
  int64_t peak_bytes = 0;  ///< high-water mark of live buffers as the ops ran
  MemoryByClass memory;    ///< live bytes at that mark, on the rank with the highest; below, the other spaces at their own marks
  MemoryByClass host_memory, nvme_memory;
  int64_t arena_bytes = 0;
  int64_t resident_bytes = 0;  ///< of the whole process, in the memory of the processor or of the devices
  /// Growth of the process beyond the arenas, at its peak; negative where arenas were not filled. On devices: of the memory in use
  /// there since before the first context (where NVML tells; else since there was one).
  int64_t unplanned_memory_bytes = 0;
  std::vector<MemoryItem> unplanned_memory;  ///< on devices: the same bytes by item; they add up to it
  std::optional<int64_t> wire_bytes;  ///< counted where they were sent; none where the transport cannot count (`counts_wire`)
  std::vector<double> losses;         ///< by step, from the first
  int64_t skipped_steps = 0;          ///< steps whose update was left out, of all steps run, warm-up included
  int64_t rolled_back_steps = 0;      ///< steps that were taken back and made again in step (post_validation), warm-up included
  int64_t expert_reruns = 0;  ///< steps that ran again for want of room for rows of experts (expert_bound), warm-up included
  std::optional<double> staleness_mean;    ///< of a parameter server: updates made since a worker was given the values it used
  std::optional<int64_t> staleness_worst;  ///< the most
  /// Rows of the fullest expert over the mean, of a layer and step; the mean over the layers with experts, and over the measured steps.
  /// Then that of the last step, and both by rank, where ranks share experts: rows that a rank's experts worked at. 1: all have as many.
  std::optional<double> expert_imbalance, expert_imbalance_last, expert_rank_imbalance, expert_rank_imbalance_last;
  /// `expert_rank_imbalance` of the same rows if experts were contiguous; none where they are.
  std::optional<double> expert_rank_imbalance_contiguous;
  /// Rows of a rank's experts in one layer and micro-batch over the rows that the tokens of one rank choose in it: the largest value of the
  /// measured steps. None where no ranks share experts.
  std::optional<double> expert_rank_imbalance_peak;
  /// Share of the chosen rows that experts of a capacity had no room for: over the measured steps, and in the last step.
  std::optional<double> expert_dropped, expert_dropped_last;
  std::optional<double> loss_scale;    ///< after the last step, where the case has one
  std::optional<double> loss_unigram;  ///< entropy of the unigram model on the same text: what a loss must beat
  std::optional<double> val_loss;
  std::optional<double> energy_j;
  double recorder_overhead_s = 0;
  std::vector<std::string> trace_gaps;  ///< what the trace's accounting leaves unexplained (`unexplained`, plan/trace.h)
  std::string kernel_variant;
  std::vector<int64_t> peak_by_rank;
};

/// Work, predicted and measured seconds of one op, summed over a period of the plan (a step, but under diloco) on one rank of the
/// role; `count` instructions share the label.
struct OpComparison {
  int stage = 0;
  std::string label;  ///< "layer.F attn.qkv"
  std::string kind;   ///< "linear.F"
  int count = 0;
  double flops = 0;
  double memory_bytes = 0;
  double payload_bytes = 0;
  double predicted_s = 0;
  double measured_s = 0;
};

/// A sentence that a sweep puts to the test: it holds where `check`, an expression over figures of its cases, does.
struct Claim {
  std::string says;
  std::string source;  ///< paper and section, or who claims it
  std::string check;   ///< "zero1.states_bytes < 0.6 * zero0.states_bytes": figures are CASE.COLUMN or CASE.CLASS_bytes
  std::string why;     ///< of a sentence that does not hold: the reason, shown beside that verdict; may be empty
  friend bool operator==(const Claim&, const Claim&) = default;
};

/// A training loss to be reached; a sweep asks for the time and tokens until then. The loss is reached with the first step at which
/// the mean of the last `mean_of` losses is at or below `loss`.
struct LossTarget {
  double loss = 0;  ///< nats a token; 0: none is asked for
  int64_t mean_of = 10;
  friend bool operator==(const LossTarget&, const LossTarget&) = default;
};

struct CaseOutcome {
  std::string case_id;          ///< hash of the resolved case, 16 hex digits
  std::string program_version;  ///< of the program that produced this row; the store fills it in
  Case config;
  Status status = Status::kOk;
  std::string reason;  ///< why refused, oom, timeout or failed
  int64_t parameters = 0;
  std::optional<Prediction> predicted;
  std::optional<Measurement> measured;
  std::vector<OpComparison> ops;
  LossTarget loss_target;  ///< of the sweep that the run directory was last run for
};

}  // namespace shardlab
