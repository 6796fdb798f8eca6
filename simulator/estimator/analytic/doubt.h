// How far an estimate can be trusted: an interval as wide as what the estimate rests on is doubtful.
//
//   Interval: [p / e^s, p e^s] around an estimate p, where s^2 = m^2 sum over terms of (scale amount)^2
//
// A term's amount says how much of the estimate rests on it: of a step, the shares of its time by use; of bytes, their shares by use;
// of both, what no scored run had (a device, a framework, ...). A term's scale says how far off predictions were for it: the error
// of a step that consists of it. Scales and `m` are learnt from published runs (validate/interval.h) and ship as
// simulator/published/intervals.csv.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "plan/base/result.h"
#include "simulator/estimator/analytic/analytic.h"

namespace shardlab::simulator::analytic {

enum class DoubtTerm : uint8_t {
  // Shares of a step.
  kCompute,    ///< forward, backward, recompute, update
  kLaunch,     ///< the device waits for the host
  kExchange,   ///< exposed exchanges of tensor and context parallelism
  kExperts,    ///< exposed exchanges of experts
  kReduction,  ///< exposed gradients and gathered weights
  kPipeline,   ///< bubble, exposed sends
  kHidden,     ///< communication beside compute, which may not be as hidden as is thought
  // Shares of bytes.
  kState,        ///< parameters, gradients, optimizer, their buffers
  kActivations,  ///< kept, of the layer that runs, logits
  kBeyond,       ///< reserved beyond the live ones
  kHeld,         ///< waiting for another stream
  // What no scored run had: 1 where it is so, the number of words, doublings beyond the largest.
  kDevice,
  kFramework,
  kPrecision,  ///< on devices of this architecture
  kMixture,
  kTechniques,  ///< square root of how many
  kSize,        ///< doublings of ranks and of parameters beyond what was seen
  kUnstated,    ///< square root of how many settings are assumed because a source does not tell
  kAllocator    ///< of a framework whose reserved bytes nobody measured
};
inline constexpr size_t kDoubtTerms = 19;
std::string_view name_of(DoubtTerm term);  ///< "compute", "unseen-device"

/// What an estimate rests on.
struct Doubt {
  std::array<double, kDoubtTerms> amounts{};  ///< the shares; the terms of what is unseen are 0
  // What the run is known by, to be looked up among scored runs.
  std::string device, framework, precision;
  std::string allocator;  ///< of reserved bytes; empty where the figure does not rest on it
  bool mixture = false;
  std::vector<std::string> techniques;
  double ranks = 1, parameters = 0;
  int unstated = 0;

  double& operator[](DoubtTerm term) { return amounts[static_cast<size_t>(term)]; }
  double operator[](DoubtTerm term) const { return amounts[static_cast<size_t>(term)]; }
};

/// Of the step time of a legal point.
Doubt step_doubt(const Prepared& prepared, const Point& point, const Estimate& estimate);
/// Of reserved bytes, or of live ones: `held` bytes of them, or more, wait for another stream; live bytes have no `beyond` and `held`.
Doubt memory_doubt(const Prepared& prepared, const Point& point, const MemoryBytes& memory, const HeldBytes& held);
Doubt live_doubt(const Prepared& prepared, const Point& point, const MemoryBytes& memory);

/// Words and ranges of scored runs, each word with the sources that have it.
class Seen {
 public:
  void add(const Doubt& doubt, const std::string& source);
  /// The terms of what no run had, where runs of the sources `without` do not count.
  void look_up(Doubt& doubt, const std::set<std::string>& without = {}) const;

  struct Extent {
    double most_ranks = 0, least_parameters = 0, most_parameters = 0;
  };
  const std::map<std::string, std::set<std::string>>& words() const { return words_; }
  const std::map<std::string, Extent>& extents() const { return extents_; }  ///< by source
  void set_word(const std::string& word, const std::string& source) { words_[word].insert(source); }
  void set_extent(const std::string& source, const Extent& extent) { extents_[source] = extent; }

 private:
  std::map<std::string, std::set<std::string>> words_;
  std::map<std::string, Extent> extents_;
};

/// Learnt scales of one figure.
struct Spread {
  std::array<double, kDoubtTerms> scales{};
  double multiplier = 1;
  /// s of the formula above; `doubt` has been looked up.
  double of(const Doubt& doubt) const;
};

/// Times or bytes around an estimate that nine of ten runs lie between.
struct Between {
  double low = 0, high = 0;
  static Between around(double value, double spread);
  bool overlaps(const Between& other) const { return low <= other.high && other.low <= high; }
};

/// What was learnt about one figure, and from which runs.
struct LearntFigure {
  Spread spread;
  Seen seen;
  double spread_of(Doubt doubt) const { return seen.look_up(doubt), spread.of(doubt); }
};
struct Learnt {
  LearntFigure step, memory;
};

std::string write_learnt(const Learnt& learnt);  ///< `figure,kind,name,value`
Result<Learnt> read_learnt(std::string_view text);
const Learnt& published_learnt();  ///< simulator/published/intervals.csv, compiled in

/// Seconds of a step that nine of ten runs like it lie between, by the published runs.
Between step_between(const Prepared& prepared, const Point& point, const Estimate& estimate);

/// How much two estimates of one study may be off against one another, as a logarithm. What both rest on alike tells neither from the
/// other, so only the terms count in which they differ.
double spread_apart(const LearntFigure& figure, Doubt a, Doubt b);

}  // namespace shardlab::simulator::analytic
