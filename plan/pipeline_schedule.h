// Pipeline schedules as data: for each stage the order of its compute slots.
//
// The layers of a model are cut into PARTS, consecutive runs in model order; a stage holds one part or several. A SLOT is one
// part's forward (F), gradient of its input (I), gradient of its weights (W), or both of these at once (B), for one micro-batch. A
// schedule is a list of slots a stage. Everything else follows from it: which messages travel, what is in flight, how long a step
// idles. Strategies lower it, the simulator counts on it, the command line prints it, and it is read from and written to the CSV
// files of PyTorch's pipelining (one row a stage, cells as "0F0": part, slot, micro-batch).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "plan/base/result.h"

namespace shardlab {

/// The schedules that the program itself names; further named schedules (pipeline_orders.cpp) follow.
enum class Schedule : uint8_t {
  kNone,  ///< one stage
  kAfab,
  k1F1B,
  kInterleaved,
  kBreadthFirst,
  kZbH1,
  kZbH2,
  kZbV,
  kVHalf,
  kVMin,
  kDualPipe,
  kDualPipeV,
  kNaive,       ///< one micro-batch at a time through all stages
  kAuto = 254,  ///< not chosen yet: whichever is predicted to be the fastest that fits
  kTable,       ///< a table of slots, read from a file
};

/// How many there are with a name: Schedule(0) and on.
int named_schedules();
/// Whether its slots follow from stages, parts and micro-batches: all but kAuto and kTable.
bool is_named(Schedule schedule);
/// The schedule with this name, "auto" and "table" included.
std::optional<Schedule> schedule_named(std::string_view name);
std::string_view name_of(Schedule v);  ///< "none", "afab", "1f1b", "interleaved", "breadth-first", ..., "naive", "auto", "table"

enum class SlotWork : uint8_t { kF, kI, kW, kB };

/// One compute slot of a stage: a part, for one micro-batch.
struct PipelineSlot {
  SlotWork work = SlotWork::kF;
  int part = 0;
  int micro_batch = 0;
  friend bool operator==(const PipelineSlot&, const PipelineSlot&) = default;

  /// Whether gradients of the part's weights are made in it.
  bool makes_gradients() const { return work == SlotWork::kW || work == SlotWork::kB; }
  /// Whether the gradient of the part's input is made in it.
  bool goes_back() const { return work == SlotWork::kI || work == SlotWork::kB; }
};

/// "2F0", as PyTorch writes it.
std::string print(const PipelineSlot& slot);

/// How the parts of the model lie on the stages.
enum class PartPlacement : uint8_t {
  kLooped,    ///< part q on stage q mod p
  kFolded,    ///< two parts a stage: q and 2 p - 1 - q, a V
  kMirrored,  ///< p parts, each on two stages: q and p - 1 - q; the first micro-batches go down, the others up
  kListed,    ///< as a table has it
};

struct PipelineSchedule {
  PartPlacement placement = PartPlacement::kLooped;
  int stages = 1;
  int parts = 1;
  int micro_batches = 1;
  std::vector<int> listed;                         ///< of kListed: the stage of each part
  std::vector<std::vector<PipelineSlot>> order{};  ///< by stage

  /// The stage that computes a part for a micro-batch.
  int stage_of(int part, int micro_batch) const;
  /// The parts of a stage, ascending.
  std::vector<int> parts_of(int stage) const;
  /// Micro-batches that go down a mirrored schedule; of any other schedule, all of them.
  int downward() const { return placement == PartPlacement::kMirrored ? (micro_batches + 1) / 2 : micro_batches; }
};

/// The size of a schedule: how many stages, parts a stage (looped schedules only), and micro-batches.
struct PipelineShape {
  Schedule schedule = Schedule::kNone;
  int stages = 1;
  int virtual_stages = 1;
  int micro_batches = 1;
  friend bool operator==(const PipelineShape&, const PipelineShape&) = default;
};

/// Whether a stage holds two parts of the model, one on the way down and one on the way back: kFolded.
bool is_folded(Schedule schedule);
/// Whether each part lies on two stages: kMirrored.
bool is_mirrored(Schedule schedule);
/// Whether a stage holds `virtual_stages` parts: interleaved and breadth-first.
bool is_looped(Schedule schedule);
/// Whether its slots tell the gradient of inputs from the gradient of weights.
bool splits_backward(Schedule schedule);
/// Parts of the model under a schedule.
int parts_of(const PipelineShape& shape);

/// Refuses stages and parts that a schedule cannot have. Any number of micro-batches goes with any schedule.
Result<void> check(const PipelineShape& shape);

/// The slots of a schedule that `check` lets pass; `shape.schedule` is named.
///
/// A schedule that its paper states for certain numbers of micro-batches (interleaved: multiples of p; zb-v: 2 p - 1 and more;
/// dualpipe, dualpipe-v: even, 2 p and more) is made for the next such number and loses the slots of those that are not there: what
/// is left of an order without a deadlock has none.
///
/// afab, breadth-first  all forwards, then all backwards. Huang et al. 2019; Lamy-Poirier 2022
/// 1f1b                 min(m, p - 1 - s) forwards to warm up, then one forward and one backward in turn. Narayanan et al. 2019
/// eager-1f1b           the same with min(m, 2 (p - 1 - s)) forwards to warm up. Zhuang et al. 2023
/// interleaved          the same as 1f1b of v parts a stage, p micro-batches of a part at a time. Narayanan et al. 2021, section 2.2
/// zb-h1, zb-h2         1f1b with the gradients of weights s, or 2 s, micro-batches later. Qi et al. 2023, section 2
/// zb-v, v-half, v-min  two parts a stage in a V. Qi et al. 2023, section 6; Qi et al. 2024, section 3
/// dualpipe, dualpipe-v micro-batches from both ends; the same in a V. DeepSeek-AI 2024, section 3.2.1
PipelineSchedule make_schedule(const PipelineShape& shape);

/// Times of the slots by part (B takes I + W), and of a message between stages. Any unit of time.
struct SlotCosts {
  std::vector<double> forward, input, weight;
  double hop = 0;

  static SlotCosts uniform(int parts, double forward, double input, double weight, double hop = 0);
  double of(const PipelineSlot& slot) const;
};

struct SlotTime {
  double begin = 0, end = 0;
};

/// When each slot runs if every stage takes its slots in order, and each slot begins as soon as its inputs have come.
struct ScheduleTimes {
  std::vector<std::vector<SlotTime>> slots;  ///< as PipelineSchedule::order
  double end = 0;
};

/// Refuses an order in which some slot waits forever; the message names the slot and what it waits for.
Result<ScheduleTimes> play(const PipelineSchedule& schedule, const SlotCosts& costs);

/// Refuses a schedule that is none: a part for a micro-batch without its forward, its gradients, or with one of them twice; a
/// slot on a stage that does not hold its part; an order that contradicts what slots need of one another. The message names
/// stage and slot.
Result<void> check(const PipelineSchedule& schedule);

/// The most activations that a stage holds at a time, counted in activations of a whole stage: a part counts 1 / (parts of the
/// stage). A part's activations are held from its forward until the gradients of its weights are made.
double most_held(const PipelineSchedule& schedule, int stage);

/// A schedule made by a list scheduler, from no paper. Each stage takes a slot that is ready: gradients of inputs first, then a
/// forward as long as no more than `held` activations (of a whole stage) are in flight, else gradients of weights. Parts are looped
/// (`virtual_stages` of them) or folded. `held` is at least 1 for a looped pipeline of one part a stage, else at least 1 + 1/v.
PipelineSchedule list_schedule(PartPlacement placement, int stages, int virtual_stages, int micro_batches, const SlotCosts& costs,
                               double held);

/// One row a stage, cells in order, separated by commas: as PyTorch's `_load_csv` reads with format "compute_only".
std::string to_csv(const PipelineSchedule& schedule);
/// Reads what `to_csv` writes. Cells may be empty: a stage that idles. `where` names the file in messages, which give line and column of the cell.
Result<PipelineSchedule> from_csv(std::string_view text, std::string_view where);

/// The slots against unit time, one row a stage: what --grid prints.
std::string print_grid(const PipelineSchedule& schedule, const SlotCosts& costs);

}  // namespace shardlab
