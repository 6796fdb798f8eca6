// An answer of the memory calculator about one layout: bytes by stage and item at three levels (live, reserved by the allocator,
// used of the device), the moment of the peak, how far it can be trusted, and whether it fits.
//
// Answers have two sources. `analytic_answer` here is the estimate of a framework's run. Runs of shardlab's executor are answered
// from their plan, to the byte; the owner of the plan puts the figures into the same form.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "simulator/estimator/analytic/analytic.h"
#include "simulator/estimator/analytic/doubt.h"

namespace shardlab::simulator::whatif {

/// The classes of the contract (ARCHITECTURE.md, section 3), which add up to the live peak, and what comes on top.
enum class ItemGroup : uint8_t { kParameters, kGradients, kOptimizer, kActivations, kBuffers, kWorkspace, kReserved, kDevice };
inline constexpr size_t kLiveGroups = 6;
inline constexpr size_t kGroups = 8;
std::string_view name_of(ItemGroup group);  ///< "parameters", ..., "reserved", "device"

/// One line of the table of a stage.
struct Item {
  ItemGroup group = ItemGroup::kParameters;
  std::string name;
  int64_t bytes = 0;
};

/// One rank of a stage at its peak.
struct StageAnswer {
  int32_t stage = 0;
  std::vector<Item> items;                   ///< items of more than 0 bytes
  std::string moment;                        ///< when the peak is reached, as a sentence's end: "the loss of micro-batch 1"
  std::string op;                            ///< what runs then
  int64_t host_bytes = 0, nvme_bytes = 0;    ///< offloaded state, beside the device
  std::vector<Item> host_items, nvme_items;  ///< the items by class, where that is known
  /// On a mixed machine the stage's own device and the bytes that one rank may use of it; else empty and 0: as `Answer::capacity`.
  std::string device_id;
  int64_t capacity = 0;

  int64_t of(ItemGroup group) const;
  int64_t live() const;                                        ///< the first six groups
  int64_t reserved() const;                                    ///< live and what the allocator holds beyond it
  int64_t device() const;                                      ///< reserved and what no allocator sees
  void add(ItemGroup group, std::string name, int64_t bytes);  ///< nothing where `bytes` is 0
};

/// A range that holds the truth in nine of ten runs.
struct Interval {
  int64_t low = 0, high = 0;
};

enum class Verdict : uint8_t {
  kUnknown,   ///< nobody stated the device's memory
  kFits,      ///< even at the upper end of the interval
  kTight,     ///< the prediction fits, the upper end does not
  kUnlikely,  ///< the prediction does not fit, the lower end does
  kNo         ///< not even at the lower end
};
std::string_view name_of(Verdict verdict);  ///< "unknown", "fits", "tight", "unlikely", "no"

/// Device bytes of nine in ten runs: `reserved` within a relative `error`, and what no allocator sees `beside` it.
Interval device_interval(int64_t reserved, int64_t beside, double error);
/// The verdict of a prediction with its interval on a device of `capacity` bytes; 0: not known.
Verdict verdict_of(int64_t device, Interval range, int64_t capacity);

struct Answer {
  std::vector<StageAnswer> stages;
  bool exact = false;   ///< from a plan of shardlab's executor: live bytes equal those of the run
  bool packed = false;  ///< the plan's arenas were laid out, so that reserved bytes are exact too
  /// Relative error of live and of reserved bytes that nine of ten runs like it stay within; 0 where exact. Both widen with what live
  /// bytes rest on and no published run had. What an allocator caches beyond is given back before an allocation fails, and does not.
  double live_error = 0, reserved_error = 0;
  int64_t capacity = 0;                          ///< bytes that one rank may use (of the worst stage); 0: not known
  int64_t host_capacity = 0, nvme_capacity = 0;  ///< the same of its part of host memory and drives
  double step_s = 0;                             ///< predicted; 0: not known
  analytic::Between step;                        ///< seconds that nine of ten runs like it lie between; 0: not known
  bool transferred = false;                      ///< the step time is built on a constant that nobody measured on this device

  const StageAnswer& worst() const;  ///< the stage that needs most of its device: on a mixed machine the largest share of its own
  Interval live() const;             ///< of the worst stage
  Interval device() const;
  Verdict verdict() const;
  /// Whether the prediction itself, not the interval, fits in every space whose capacity is known.
  bool fits() const { return (capacity <= 0 || worst().device() <= capacity) && fits_outside(); }
  /// Whether it fits in host memory and on NVMe.
  bool fits_outside() const;
  int64_t headroom() const { return capacity - worst().device(); }  ///< negative: so much is missing
};

/// The least errors that `analytic_answer` states: nine of ten tuned runs lie within (simulator/published/runs: live bytes of
/// simumax_b200, reserved bytes of torchtitan). tests/validate/test_published.cpp holds them to the result of `validate`.
inline constexpr double kLiveError = 0.02;
inline constexpr double kReservedError = 0.10;

/// An upper bound on the share by which packing an arena exceeds the live peak of a plan of shardlab's executor.
/// tests/cli/test_memory.cpp holds plans to it.
inline constexpr double kPacking = 0.05;
/// Relative error of reserved bytes under a profile, before its plan, if it has one, is packed.
double reserved_error_of(const analytic::FrameworkProfile& profile);
/// The same for all layouts of a study, half of whose bytes are state: wider where no published run had its machine, framework, model or
/// precision.
double reserved_error_of(const analytic::Prepared& prepared, Precision precision);

/// The estimate for a legal point, every stage. `capacity` as in Answer.
Answer analytic_answer(const analytic::Prepared& prepared, analytic::Estimator& estimator, const analytic::Point& point,
                       int64_t capacity);

/// The differences between two answers, item by item, on their worst stages: what saves most first, what costs most last.
struct Difference {
  std::string name;
  int64_t before = 0, after = 0;
};
std::vector<Difference> differences(const Answer& before, const Answer& after);

}  // namespace shardlab::simulator::whatif
