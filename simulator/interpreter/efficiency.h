// The share of a data sheet's rates that a program reaches, and the cost of a step of a collective that follows from it.
#pragma once

namespace shardlab::simulator {

/// The share of a data sheet's peaks that a real program reaches. Stated, never tuned on a case.
struct Efficiency {
  double matmul = 0.60;             ///< of the dense peak, on large matrices
  double memory = 0.80;             ///< of the memory bandwidth, streaming
  double link = 0.80;               ///< of the links within a node, large messages
  double network = 0.80;            ///< of the links between nodes
  double ramp_flops = 2e9;          ///< a matmul of this size reaches half of `matmul`
  double step_latency_s = 2e-6;     ///< of one step of a collective within a node
  double network_latency_s = 8e-6;  ///< of one step between nodes
  double launch_s = 4e-6;           ///< host cost of one launch
  double wake_s = 2e-6;             ///< an event from one stream to another
};

/// The links between the ranks of a group.
struct Way {
  int nodes = 1;
  int fewest_on_a_node = 1;
  double link = 0;   ///< bytes/s of a device within its node, as reached
  double inter = 0;  ///< bytes/s of a device between nodes, as reached
  bool network() const { return nodes > 1; }
  friend bool operator==(const Way&, const Way&) = default;
};

/// The cost of a collective: seconds of a step, and bytes/s that a rank sends at; 0 bytes/s: nothing joins the ranks.
///
/// Formula: the link within a node, else the lesser of the link and of the network's rate times the members on the node with the
///   fewest of them (parallel rings, one a device).
struct StepRates {
  double latency_s = 0;
  double bytes_per_s = 0;
};
inline StepRates step_rates(const Efficiency& efficiency, const Way& way) {
  const double rails = way.inter * way.fewest_on_a_node;
  const bool slower_link = way.link > 0 && way.link < rails;
  return {way.network() ? efficiency.network_latency_s : efficiency.step_latency_s,
          !way.network() || slower_link ? way.link : rails};
}

}  // namespace shardlab::simulator
