// Calibration: plans that measure a machine, and the fit of their traces.
//
//   for (const CalibrationPlan& p : calibration_plans(options)) {   // cli executes each on the runtime, recorder on
//     runs.push_back({&p, execute(p.plan, p.warmup, p.steps)});
//   }
//   machine.calibration = fit(runs, ...)
//
// Nothing but the executor itself is measured, so that whatever surrounds a kernel in a real step (dispatch, recorder,
// caches, other ranks) surrounds it here: each op under test is preceded by a copy that leaves its freshly produced operand
// in the cache, as the op before it does in a step, while weights and saved activations come from buffers that in turn are
// larger than the caches.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "plan/interfaces.h"
#include "plan/machine.h"
#include "plan/plan.h"
#include "plan/program.h"
#include "plan/trace.h"

namespace shardlab::simulator {

/// The target of a calibration: the processor, or a GPU, whose shapes are larger and whose ranks are alone on it.
enum class CalibrationTarget : uint8_t { kProcessor, kGpu };

struct CalibrationOptions {
  CalibrationTarget target = CalibrationTarget::kProcessor;
  int cores = 1;                             ///< ranks that run at once in the contended plans
  std::vector<int> group_sizes = {2, 4, 8};  ///< powers of two
  double scale = 1;                          ///< of the number of repeats: 0.5 takes half as long
  int rounds = 3;                            ///< of all plans of a processor
};

/// One plan to execute: `warmup` steps that do not count, then `steps` that do, all recorded. Plans come in the order to run them:
/// alternating between one rank and all cores, and each several times over, because the speed of a shared machine drifts.
struct CalibrationPlan {
  std::string name;  ///< "linear x2, round 3"
  Plan plan;
  int concurrency = 1;     ///< ranks that compute at the same time
  bool crowded = false;    ///< its streams outnumber the cores, and hand them on
  bool canonical = false;  ///< of a GPU: own kernels in fixed order, where the library's serve else
  int warmup = 1;
  int steps = 3;
};

std::vector<CalibrationPlan> calibration_plans(const CalibrationOptions& options);

/// The token ids that calibration plans load: random, each below the smallest vocabulary that they use.
class CalibrationTokens final : public BatchSource {
 public:
  void sequence(int64_t sequence, std::span<int32_t> out) const override;
};

/// A plan with what its execution recorded. `trace.steps` counts the measured steps only, or all of them: the first
/// `skip` steps of it are ignored.
struct CalibrationRun {
  const CalibrationPlan* plan = nullptr;
  Trace trace;
  int skip = 0;
};

/// The origin of a calibration; copied into it.
struct CalibrationOrigin {
  std::string date;  ///< ISO 8601
  std::string command;
  std::string processor;
  std::string kernel_variant;
  double turn_s = 0;          ///< Calibration::turn_s of the executor that measured
  bool launch_ahead = false;  ///< Calibration::launch_ahead
};

/// Points are medians over every step and round of the same op at the same concurrency, with relative spread and count.
/// The id is the date and a hash of the points.
Calibration fit(std::span<const CalibrationRun> runs, const CalibrationOrigin& origin);

/// Kernels that `calibration_plans` measure on a processor and `calibration` has no point of, by name, ascending: an older version measured
/// it. Ops of these kernels are priced by their flops and bytes alone, which may be too little by far (`adamw8bit`: a hundredth).
std::vector<std::string> kernels_not_measured(const Calibration& calibration);

/// How steady the machine was: of products that take 30 us or more, the median of `RatePoint::spread`, by concurrency.
std::map<int, double> spread_of_products(const Calibration& calibration);

/// This machine as a Machine: local, with the calibration, peak flops of one core = the best measured matmul rate, memory bandwidth
/// of one core = the best measured rate of AdamW on buffers beyond the caches, one device a core.
Machine local_machine(const Calibration& calibration, int cores, int64_t memory_bytes);

/// This machine's GPUs as a Machine, likewise: one "core" a device, which ranks that share it share out; peak flops by the element
/// types measured. `device` names it.
Machine local_gpu_machine(const Calibration& calibration, const std::string& device, int devices, int64_t memory_bytes);

}  // namespace shardlab::simulator
