// Places the times of one clock on another: a device's nanoseconds on the session's seconds.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "plan/interfaces.h"

namespace shardlab::profiler {

/// One reading of the tracer's clock between two of the session's, seconds.
struct ClockPair {
  double before = 0;
  int64_t tracer_ns = 0;
  double after = 0;
};

/// `count` paired readings, one right after the other.
std::vector<ClockPair> read_clock_pairs(const Clock& session, const std::function<int64_t()>& tracer_ns, int count = 101);

/// An affine map from the tracer's clock to the session's through one or two anchors.
///
/// Formula: an anchor is made of repeated pairs. The half of them that was read the quickest is kept; the offset is the median of
/// (before + after) / 2 - tracer, its error the largest half-width kept plus the largest distance of an offset from the median.
/// Between two anchors the offset is interpolated, beyond them kept on the line. Two clocks that drift apart by more than 200 ppm
/// between the anchors were set in between (NTP slews by less): the drift is then added to the error.
class ClockAlignment {
 public:
  /// The identity: both clocks are one; seconds are nanoseconds times 1e-9.
  ClockAlignment() = default;
  /// `last` may be empty: one anchor. `first` must not be.
  ClockAlignment(std::span<const ClockPair> first, std::span<const ClockPair> last);

  /// On the session's clock.
  double seconds(int64_t tracer_ns) const;
  /// How far `seconds` may be off between the anchors.
  double error_s() const { return error_s_; }

 private:
  int64_t origin_ns_ = 0;  ///< of the first anchor: differences to it are exact in a double, 1e18 ns are not
  double origin_s_ = 0;
  double rate_ = 1;  ///< seconds of the session's clock per second of the tracer's
  double error_s_ = 0;
};

}  // namespace shardlab::profiler
