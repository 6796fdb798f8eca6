// Pipeline schedules in closed form: micro-batches in flight and idle time, for stages that need not be equal.
#pragma once

#include <cstdint>
#include <span>

#include "simulator/estimator/analytic/analytic.h"

namespace shardlab::simulator::analytic {

/// The schedules of more than one stage that have a closed form, in the order of `Schedule`: what a search tries and what a profile's
/// `can.schedules` may list.
std::span<const Schedule> estimated_schedules();

/// Whether a stage runs all forwards before its first backward.
constexpr bool forwards_first(Schedule s) { return s == Schedule::kAfab || s == Schedule::kBreadthFirst; }
/// Copies of the parameters that a rank holds.
constexpr int parameter_copies(Schedule s) { return s == Schedule::kDualPipe ? 2 : 1; }

/// The stages as a schedule sees them, per micro-batch. Seconds.
struct StageTimes {
  double forward = 0;  ///< of the mean stage
  double input = 0;    ///< backward for the input, recompute included
  double weight = 0;   ///< backward for the weights
  double longest = 0;  ///< all of the slowest stage
  double sum = 0;      ///< all of all stages
};

/// Most micro-batches between forward and backward on a stage, in activations of a whole stage (an interleaved stage holds parts).
/// Formula: none 1; afab, breadth-first m; 1f1b min(m, p - r); interleaved min(m v, 2 (p - 1 - r) + (v - 1) g + 1) / v;
///   g the micro-batches that a part takes before the next does, p of them where nothing is asked for; zb-h1 min(m, p); zb-h2
///   min(m, 2 p - 1); zb-v min(m, p); v-half min(m, (p + 2) / 2) and v-min min(m, (p + 4) / 3), rounded
///   down; dualpipe and dualpipe-v min(m, p + 1).
/// Source: Narayanan et al. 2021, section 2.2; Qi et al., "Zero Bubble Pipeline Parallelism" (2023), table 2, and
///   "Pipeline Parallelism with Controllable Memory" (2024), table 2; DeepSeek-V3 (2024), table 2.
double in_flight(Schedule schedule, int64_t stages, int64_t stage, int64_t micro_batches, int64_t virtual_stages,
                 int64_t group = 0);
inline double in_flight(const Point& p, int64_t stage) {
  return in_flight(p.schedule, p.pp, stage, p.grad_accumulation, p.vpp, p.micro_batch_group);
}
/// Those of them that lie in one part of a looped stage, when its last forward before the first backward is over: parts take turns, a
/// group of micro-batches each (schedule table of Megatron-LM core/pipeline_parallel/schedules.py).
double in_flight_of_part(const Point& point, int64_t stage, int64_t part);

/// Seconds in which the slowest stage has nothing to do, fill and drain.
/// Formula, t the time of a micro-batch on a stage: afab, 1f1b (sum of t over the others); interleaved, breadth-first the same / v;
///   zb-h1 (p - 1)(F + I - W); zb-h2, zb-v (p - 1)(F + I - 2 W); v-half and v-min half and two thirds of 1f1b;
///   dualpipe (p / 2 - 1)(F + 2 I - W); dualpipe-v half of (p - 1)(F + 2 I - W); none below zero.
/// Source: as above.
double bubble_s(Schedule schedule, int64_t stages, int64_t virtual_stages, const StageTimes& times);

}  // namespace shardlab::simulator::analytic
