// The space of a search: every way to put a model on a number of devices and to run one batch on them.
//
// Points come in two levels. A *cut* fixes devices, dp tp pp cp ep, micro-batch, recompute, sequence parallelism and the algorithm
// of collectives: what layers cost. Its *choices* are state (zero, hybrid_shard, bucket_bytes, offload) and order (schedule, vpp):
// every cut with each of its states and orders is a point.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "plan/base/result.h"
#include "simulator/estimator/analytic/analytic.h"

namespace shardlab::simulator::search {

using analytic::CpKind;
using analytic::Medium;
using analytic::Point;
using analytic::Schedule;

struct Offload {
  Medium activations = Medium::kDevice, optimizer = Medium::kDevice, parameters = Medium::kDevice;
  friend bool operator==(const Offload&, const Offload&) = default;
};

/// Values that each axis may take. An empty list stands for every value that could be legal: divisors of the size that an axis cuts
/// (the devices, the layers of a stage, the experts, the sequences of a rank), all stages of ZeRO, all schedules, no offload and
/// offload to the processor's memory, none, selective and full recompute. Sizes of buckets and algorithms of collectives are varied
/// only if they are listed; an empty list is the framework's own size, and `auto`.
struct Space {
  bool slices_experts =
      false;  ///< whether experts that ranks share are also cut by ranks of tp; else whole, where `expert_tp` lists nothing
  analytic::Abilities can;       ///< the framework's; a technique that it lacks is not in the space, unless a list below names it
  std::vector<int32_t> devices;  ///< numbers of ranks; at least one
  int64_t seq_len = 0;
  int64_t sequences = 0;  ///< of a step over all ranks
  Precision precision = Precision::kBf16;
  std::vector<int32_t> dp, tp, pp, vpp, cp, ep, expert_tp, zero, micro_batch, grad_accumulation, hybrid_shard;
  std::vector<Schedule> schedule;
  std::vector<uint8_t> sequence_parallel;
  std::vector<analytic::Recompute> recompute;
  std::vector<Offload> offload;
  std::vector<CpKind> cp_kind;
  std::vector<int64_t> bucket_bytes;                  ///< for gradients reduced in buckets: several ranks, zero 0 to 2
  std::vector<AlgorithmChoice> collective_algorithm;  ///< of more than one rank
  std::map<int32_t, double> expert_skew;              ///< by ep: tokens of the busiest rank over the mean; 1 where it is not listed
};

/// Refuses a space without devices, with sizes below one or a batch of no sequence.
Result<void> check(const Space& space);

/// State of a cut: what of it stays where.
struct State {
  int32_t zero = 0, hybrid_shard = 0;
  int64_t bucket_bytes = -1;
  Offload offload;
};
/// Order of a cut: when stages compute.
struct Order {
  Schedule schedule = Schedule::kNone;
  int32_t vpp = 1;
};

/// Positive divisors of `n`, ascending.
std::vector<int32_t> divisors(int64_t n);

/// Calls `visit` with each cut on `devices` ranks, as a point of zero 0 and schedule none (1f1b if pp is above 1). A cut may be
/// illegal. Calls `undivided` with each layout of ranks whose dp does not divide the batch, or whose given micro_batch and
/// grad_accumulation do not give that batch.
void for_each_cut(const Space& space, const analytic::ModelShape& shape, int32_t devices,
                  const std::function<void(const Point&)>& visit, const std::function<void(const Point&)>& undivided);

/// States of a cut on nodes of `devices_per_node`: zero 3 also with shards inside a node, parameters offloaded under zero 3 alone.
std::vector<State> states_of(const Space& space, const Point& cut, int32_t devices_per_node);
/// Orders of `stages` stages of a model with `layers` layers.
std::vector<Order> orders_of(const Space& space, int64_t layers, int32_t stages);

/// The point of a cut in a state and order.
Point with(Point cut, const State& state);
Point with(Point cut, const Order& order);

}  // namespace shardlab::simulator::search
