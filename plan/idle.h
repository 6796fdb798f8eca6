// The time in which a rank runs nothing, by cause.
#pragma once

namespace shardlab {

/// Why nothing ran on one rank in one step: the parts add up to `idle_s`. An op that waits for its peers counts as idle until its
/// last peer has arrived.
struct IdleBreakdown {
  double idle_s = 0;        ///< the step minus the union of all ops that ran
  double peer_s = 0;        ///< a collective, send or receive was there, a peer was not
  double dependency_s = 0;  ///< the next op to run waited for an op of another stream
  double host_s = 0;        ///< the next op had not been launched: the host is too slow
  double latency_s = 0;     ///< launched and free to run, but not begun: what the device takes from one op to the next
  double tail_s = 0;        ///< after the last op: the host ends the step
  double other_s = 0;       ///< none of these, or not known (a trace without launch times)
  friend bool operator==(const IdleBreakdown&, const IdleBreakdown&) = default;
};

}  // namespace shardlab
