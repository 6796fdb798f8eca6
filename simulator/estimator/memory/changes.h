// Changes that make a layout fit, by predicted cost in time: an exhaustive look at the layouts beside it.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "simulator/estimator/analytic/analytic.h"

namespace shardlab::simulator::whatif {

/// Keys of the command line and their values.
using Words = std::vector<std::pair<std::string, std::string>>;

/// The point in the words of the command line, batch and layout; neutral values (vpp 1, no offload) are left out.
Words words_of(const analytic::Point& point);
/// The words of `to` that differ from the words of `from`.
Words changed_words(const analytic::Point& from, const analytic::Point& to);
/// "zero=3 recompute=full".
std::string text_of(const Words& words);

/// One way to make it fit.
struct Change {
  analytic::Point point;
  Words words;               ///< what differs from the layout that was asked about
  int64_t device_bytes = 0;  ///< of the worst stage
  int64_t host_bytes = 0;    ///< of one rank, where something is offloaded
  double step_s = 0;
  double slowdown = 0;  ///< step time relative to the layout of the question, less one: negative where it is faster
};

struct ChangeOptions {
  int64_t capacity = 0;  ///< bytes that one rank may use
  Lower lower;           ///< where given, only layouts that shardlab's executor runs, each that is told of by its plan
  /// Seconds of a step of a case by its plan, for layouts that are told of under `lower`; none: as estimated.
  std::function<double(const Case&, const CasePlan&)> seconds;
  bool bf16 = false;  ///< the device multiplies in bf16, so fp32 may become bf16
  size_t most = 6;    ///< changes that are listed
};

struct Advice {
  std::vector<Change> changes;  ///< that fit, the fastest first
  Change least;                 ///< with the fewest device bytes of all that were looked at, the layout itself included
  int64_t looked_at = 0;        ///< legal layouts
  bool scaled = false;          ///< steps are the estimate's, in proportion to what the layout of the question takes by its plan
};

/// Layouts on the same devices and with the same tokens a step that fit. Looks at every combination of at most three of: recompute
/// (none, selective, full), zero raised, micro-batches halved and accumulated more, tp, cp and pp doubled up to eightfold at the
/// expense of dp, bf16 in place of fp32, ep doubled, sequence parallelism, 1f1b in place of afab, weights given back after forward,
/// optimizer and activations offloaded to the host. Leaves out a layout that contains all changes of a faster one, and a layout
/// within 2 % of the capacity, which may not fit. Under `lower` the estimate ranks layouts, and the reported ones have the bytes of
/// their plans: plans are made in order of time until enough layouts fit, and for the few layouts of the least estimated bytes. Of a
/// model of thousands of layers few plans are made, so that fewer layouts may be listed. Steps are those of plans too, where layers
/// times micro-batches are few; else `Advice::scaled`.
Advice advise(analytic::Estimator& estimator, const analytic::FrameworkProfile& profile, const analytic::Point& point,
              const ChangeOptions& options);

}  // namespace shardlab::simulator::whatif
