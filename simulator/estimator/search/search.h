// The best layouts for a number of devices and a batch, and why all others lost.
//
//   auto studies = ...;                                  // a prepared study for each number of devices
//   Found found = search(studies, space, options, &watcher);
//
// Exhaustive, best first. Cuts come in the order of a lower bound on the objective. Points that a bound proves to be
// neither among the best nor on the Pareto front are counted, not estimated. The answer equals the answer of
// estimating everything (tests/search).
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "simulator/estimator/analytic/analytic.h"
#include "simulator/estimator/memory/answer.h"
#include "simulator/estimator/search/space.h"

namespace shardlab::simulator::search {

enum class Objective : uint8_t { kTime, kMemory, kCost };
std::string_view name_of(Objective v);  ///< "time", "memory", "cost"
std::optional<Objective> objective_named(std::string_view name);

/// One number of devices.
struct Study {
  int32_t devices = 1;
  analytic::Prepared prepared;  ///< on a machine with that many
};

struct Options {
  Objective objective = Objective::kTime;
  int32_t top = 10;            ///< layouts to rank
  int64_t capacity_bytes = 0;  ///< of a device; 0: nobody knows, everything fits
  bool prune = true;           ///< false: estimate every point
  double reserved_error = 0;   ///< of a profile's reserved bytes (whatif::reserved_error_of): what fits by less is tight
  int64_t margin_bytes = 0;    ///< of a device, to stay free: what leaves less is tight
  double most_s = 0;           ///< a step may take no longer; 0: no end
  Lower lower;                 ///< for `rank`, of shardlab's own executor: makes the plan from which a layout's figures are read
};

/// The verdict of `shardlab memory` on a prediction, where the margin is as free as the prediction is off.
whatif::Verdict verdict_of(const analytic::MemoryBytes& memory, const Options& options);

/// A layout that fits.
struct Candidate {
  Point point;
  analytic::Estimate estimate;
  int64_t bytes() const { return estimate.memory.device(); }
  double seconds() const { return estimate.step_s; }
  double device_seconds() const { return estimate.step_s * static_cast<double>(point.world_size()); }
};

/// Why a class of points is not among the best.
enum class Loss : uint8_t {
  kIllegal,    ///< no layout: `refusal` says why
  kUndivided,  ///< the batch cannot be cut so
  kTooLarge,   ///< does not fit
  kTight,      ///< is predicted to fit, by less than predictions are off or than the margin
  kLate,       ///< a step takes longer than it may
  kSlower,     ///< loses most time, against the best, in `time`
  kLarger,     ///< of a search for least memory: takes most more, against the best, for `memory`
  kBounded     ///< a lower bound says that it is no better: never estimated
};
struct Loser {
  Loss loss = Loss::kIllegal;
  analytic::Refusal refusal = analytic::Refusal::kNone;
  analytic::TimePart time = analytic::TimePart::kForward;
  analytic::MemoryPart memory = analytic::MemoryPart::kParameters;
  int64_t points = 0;
  Point nearest;  ///< illegal: differs from the best in fewest axes; too large: by the fewest bytes; else the best of its class
  double seconds = 0;       ///< of `nearest`; 0: not known
  int64_t bytes = 0;        ///< of `nearest`; 0: not known
  bool costs_more = false;  ///< a search for least cost: kSlower and kBounded are of device seconds
  bool is_bound = false;    ///< `nearest` was not estimated: it takes no fewer seconds and bytes
  /// In words: "does not fit", "no layout: tp does not divide the attention heads", "slower: longer pipeline bubbles".
  std::string reason() const;
};

struct Counts {
  int64_t points = 0;     ///< of the space: the sum of the three below
  int64_t refused = 0;    ///< illegal, undivided
  int64_t evaluated = 0;  ///< estimated in full
  int64_t bounded = 0;    ///< dismissed by a lower bound: no better, or too large
  int64_t cuts = 0, cuts_done = 0;
};

struct Found {
  Counts counts;
  std::vector<Candidate> best;   ///< ranked: what fits
  std::vector<Candidate> tight;  ///< ranked: what may not fit, at most as many; where `best` is full, those that beat its last
  std::vector<Candidate> front;  ///< layouts that no other beats in all of time, memory and device seconds; by time
  std::vector<Loser> losers;     ///< the commonest first
  /// Of `rank`, where nothing is among the best though layouts are possible: what comes nearest. kLate: the fastest that fits. kTooLarge: the
  /// smallest.
  std::optional<Candidate> nearest;
  Loss nearest_loss = Loss::kTooLarge;
  bool stopped = false;  ///< by the watcher: what was found so far
};

/// Told how a search goes.
class Watcher {
 public:
  virtual ~Watcher() = default;
  /// Every few thousand points, with the first of the ranked. False stops the search.
  virtual bool going(const Counts& counts, std::span<const Candidate> best) = 0;
};

/// Order among candidates: the objective, then time, bytes, devices; equal in all: by the values of the axes.
bool better(Objective objective, const Candidate& a, const Candidate& b);

/// `studies` has one for each of `space.devices`.
Found search(std::span<const Study> studies, const Space& space, const Options& options, Watcher* watcher = nullptr);

}  // namespace shardlab::simulator::search
