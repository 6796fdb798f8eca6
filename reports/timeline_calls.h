// A simulated step on its streams, said by calls of segments: a step of a million ops is some ten thousand calls.
//
// What passes in a call on one stream is its shape: its ops, placed from the begin of the first. Calls in which the same passes, to
// the nanosecond, share one shape. Calls of one segment whose inner times differ, as where a message of another stream slows some of
// them, have shapes of their own. So an op stands where it was simulated, or the call says that its ops are not placed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace shardlab::reports {

/// An op of a shape, or a wait of the stream for what the op needs.
struct ShapeOp {
  int32_t op = -1;       ///< into Timeline::ops
  int64_t begin_ns = 0;  ///< from the origin of its call; before the first op, from the begin of that op
  int64_t lasts_ns = 0;
  int64_t peer_wait_ns = 0;  ///< of these, waiting for a peer
  bool wait = false;

  friend auto operator<=>(const ShapeOp&, const ShapeOp&) = default;
};

/// What passes in a call on one stream. What differs from call to call is left to the call: a wait before everything else, which
/// lasts 0 here, and the first op's wait for its peers, which is over at the call's origin.
struct CallShape {
  int32_t segment = -1;      ///< into TimelineCalls::segments; -1: outside of every call
  int64_t lead_ns = 0;       ///< from the end of the wait before everything to the begin of the first op
  int64_t end_ns = 0;        ///< of the last op, from the origin
  int64_t busy_ns = 0;       ///< of ops, without waits
  int32_t count = 0;         ///< ops
  std::vector<ShapeOp> ops;  ///< in order of begin; empty where they are not placed
};

/// A call on one stream.
struct TimelineCall {
  int32_t shape = -1;
  int32_t layer = -1;
  int32_t micro_batch = -1;
  int64_t origin_ns = 0;     ///< from the start of the step
  int64_t wait_ns = 0;       ///< the stream waited for as long before everything
  int64_t peer_wait_ns = 0;  ///< the first op waited for its peers for as long, up to `origin_ns`

  friend bool operator==(const TimelineCall&, const TimelineCall&) = default;
};

/// What the calls of a timeline have in common.
struct TimelineCalls {
  std::vector<std::string> segments;
  std::vector<CallShape> shapes;
};

}  // namespace shardlab::reports
