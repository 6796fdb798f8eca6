// Shared by the files of the analytic estimate: a study, and the intermediate results for one point.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "plan/case.h"
#include "simulator/estimator/analytic/analytic.h"
#include "simulator/estimator/analytic/layer.h"
#include "simulator/estimator/analytic/schedule.h"
#include "simulator/interpreter/device_model.h"
#include "simulator/interpreter/fabric.h"

namespace shardlab::simulator::analytic {

struct Prepared::Inside {
  ModelShape shape;
  Machine machine;
  FrameworkProfile profile;
  FrameworkProfile::Host host;  ///< the profile's, on the machine's host
  DeviceModel device;
  Fabric fabric;
  bool transferred = false;
  std::shared_ptr<const Case> rest;       ///< what points do not say of cases of shardlab's executor; none: defaults
  bool has_fp8 = false, has_fp4 = false;  ///< the device multiplies in that precision
  bool hopper = false;                    ///< or later

  LayerStudy layers() const { return {shape, profile, host, device, fabric, {machine.devices_per_node, machine.nodes, 1}}; }
};

/// The cases that points of a study stand for, where shardlab's executor runs the study's model.
class ExecutorCases {
 public:
  explicit ExecutorCases(const Prepared::Inside& in);
  /// The case of `point`; nothing where the executor does not run it. Valid until the next call.
  const Case* of(const Point& point);
  /// Whether the executor runs the study's model and not `point`; never where the profile lists no abilities: then costs alone
  /// are asked for.
  bool refuses(const Point& point) { return possible_ && held_ && of(point) == nullptr; }
  /// The refusal that the executor gives for a point.
  Error refusal(const Point& point);

 private:
  void set_offload(const Point& point);
  bool set_compression(const Point& point);
  void set_recompute(const Point& point);

  bool possible_ = false, held_ = false;
  Case rest_;  ///< what no point says
  Case case_;  ///< of `last_`
  Point last_;
  bool have_last_ = false, runs_ = false;
};

/// How the layers of a model are dealt out: evenly, the first stages one more; but for ends that count as layers, and stages at the
/// ends with a number of their own.
struct StageLayers {
  StageLayers(const ModelShape& shape, const Point& point);
  int64_t layers(int32_t stage) const;
  int64_t before(int32_t stage) const;  ///< layers of all stages before it
  int32_t holder(int64_t layer) const;  ///< the last stage that begins at `layer` or before it
  int32_t stages = 1, uneven = 0;       ///< stages before `uneven` have one layer more
  int64_t least = 0, first_less = 0, last_less = 0, first_own = 0, last_own = 0;
  bool sound = true;  ///< the stages hold just the model's layers
};

/// Stages of one kind: equal layers and ends.
struct StageGroup {
  int32_t first = 0, count = 0;              ///< the first of them in the pipeline, and how many
  int64_t dense = 0, moe = 0;                ///< layers
  double embedding = 0, head = 0, loss = 0;  ///< 1, or the share of micro-batches for which the stage does it
  bool holds_embedding = false, holds_head = false, holds_loss = false;

  bool same_work(const StageGroup& o) const {
    return dense == o.dense && moe == o.moe && embedding == o.embedding && head == o.head && loss == o.loss &&
           holds_embedding == o.holds_embedding && holds_head == o.holds_head && holds_loss == o.holds_loss;
  }
};

/// Representative stages: at most the first, the last, and the stages beside the boundaries between q + 1 and q layers and between
/// dense and mixture layers. If stages are balanced by cost (FrameworkProfile::Model::balanced_stages), the stages of each number of
/// layers, which need not be neighbours.
class StageGroups {
 public:
  static constexpr size_t kMost = 12;
  StageGroups(const ModelShape& shape, const Point& point, bool balanced);
  std::span<const StageGroup> all() const { return {groups_.data(), static_cast<size_t>(count_)}; }
  const StageGroup& of(int32_t stage) const;
  bool balanced() const { return !kinds_.empty(); }
  /// Hops of the pipeline over which logits travel, not the residual stream: from the head to a loss on a later stage.
  int32_t logit_hops() const { return logit_hops_; }

 private:
  void add(int32_t first, int32_t count, const ModelShape& shape, const Point& point);
  void balance(const ModelShape& shape, const Point& point);
  std::array<StageGroup, kMost> groups_;
  int count_ = 0;
  int32_t logit_hops_ = 0;
  std::vector<uint8_t> kinds_;  ///< of stages balanced by cost, the group of each
};

/// Bytes a parameter of this point's precision.
struct StateBytes {
  StateBytes(const FrameworkProfile& p, const Point& point, const Trained& trained);
  double parameter, gradient, fresh, ends, master, moments, gradient_wire, weight_wire, expert_weight_wire;
  double ends_wire;    ///< weights of embedding and head as gathered: never narrower than 16 bit
  double frozen;       ///< weights that are not trained, held and gathered as they were read
  double frozen_ends;  ///< embedding and head, if they are not trained
};

/// Ranks among which state is cut and over which gradients are summed.
struct Replicas {
  explicit Replicas(const Point& p)
      : dense(int64_t{p.dp} * p.cp),
        expert(std::max<int64_t>(1, dense * p.tp / (int64_t{p.ep} * p.expert_tp))),
        shard(p.zero > 0 && p.hybrid_shard > 0 ? p.hybrid_shard : dense),
        // FSDP cuts experts among as many ranks as share a shard; an instance of the optimizer has its part of their replicas.
        expert_shard(p.zero == 3 ? std::min(shard, expert) : std::max<int64_t>(1, expert * shard / dense)) {}
  int64_t dense, expert;        ///< ranks with the same parameters
  int64_t shard, expert_shard;  ///< of them, those that cut what is cut
};

/// Collectives of the fabric by kind, group and algorithm, worked out once each. Of one study: all are stepped, or none.
class CollectiveMemo {
 public:
  explicit CollectiveMemo(const Fabric& fabric) : fabric_(&fabric), entries_(64) {}
  double seconds(CollectiveUse kind, double bytes, const Group& group, const CollectiveStyle& style);
  /// The mutual cost of compute and an all-gather of the group.
  const Contention& contention(const Group& group, const CollectiveStyle& style);

 private:
  struct Entry {
    uint64_t key = 0;  ///< 0: empty
    CollectiveCost cost;
    Contention contention;
  };
  Entry& find(uint64_t key);
  Entry& prepared(CollectiveUse kind, const Group& group, const CollectiveStyle& style);
  const Fabric* fabric_;
  std::vector<Entry> entries_;
  size_t used_ = 0;
};

/// Seconds of each kind of stage, kept from point to point while these differ in the order of their stages (schedule, vpp) alone.
class StepMemo {
 public:
  StepMemo();
  ~StepMemo();
  StepMemo(const StepMemo&) = delete;
  StepMemo& operator=(const StepMemo&) = delete;
  /// Forgets, unless `point` is such a point.
  void begin(const Point& point);
  struct Steps;  ///< time.cpp
  Steps& steps() { return *steps_; }

 private:
  Point last_;
  std::unique_ptr<Steps> steps_;
};

/// Seconds of one micro-batch on a stage by which the slowest of all devices is later than the typical one.
inline double late_of(const Block& b, double dense, double moe, double head) {
  return dense * b.dense.late_s + (moe > 0 ? moe * b.moe.late_s : 0) + head * b.head.late_s;
}

/// One point in work.
struct Frame {
  const Prepared::Inside& in;
  const Point& point;
  const Block& block;
  CollectiveMemo& collectives;
  StepMemo& steps;
  StageGroups groups;
  StateBytes bytes;
  Replicas replicas;
  CollectiveStyle style;
  double bucket_bytes;  ///< of gradients reduced together under zero 0 to 2; 0: tensor by tensor
  bool overlap_gradients, overlap_weights;
  bool gathers;         ///< zero 3
  bool keeps_gathered;  ///< whole from forward to backward

  double collective_s(CollectiveUse kind, double bytes, const Group& group) const {
    return collectives.seconds(kind, bytes, group, style);
  }
  // Elements that one rank holds, and the part of them that is trained: what has gradients and state.
  int64_t end_parameters(const StageGroup& g) const;    ///< of embedding and head; a table that is tied on one stage is one
  int64_t dense_parameters(const StageGroup& g) const;  ///< without experts
  int64_t expert_parameters(const StageGroup& g) const;
  int64_t trained_ends(const StageGroup& g) const;
  int64_t trained_dense(const StageGroup& g) const;
  int64_t trained_experts(const StageGroup& g) const;
};

/// All devices of a step together are late by some time; the part of it that a smaller number n of devices is spared.
/// Formula: 1 - (x(n) - 1) / (x(all) - 1), x of DeviceModel::slowest_of, in which seconds of matmuls at the limit of
/// power are linear.
class Spared {
 public:
  explicit Spared(const Frame& f)
      : device_(f.in.device),
        all_(f.point.pp > 1 ? device_.slowest_of(f.point.world_size()) - 1 : 0),
        part_(all_ > 0 ? 1 / all_ : 0) {}
  double among(int64_t devices) const { return part_ > 0 ? std::max(0.0, 1 - (device_.slowest_of(devices) - 1) * part_) : 0; }

 private:
  const DeviceModel& device_;
  double all_, part_;
};

/// Unsharded weights of a stage, and its gradients as backward makes them. Without zero 3 the gradients only.
struct GatheredBytes {
  double standing = 0;         ///< weights that stay: the ends, and all of them where nothing is given back
  double unit = 0;             ///< weights of one unit
  double units = 0;            ///< of them, how many are there at once in forward, the buffers that receive them included
  double backward_units = 0;   ///< in backward
  double gradient = 0;         ///< of one unit, while it runs backward, casts for the reduction included
  double gradient_stays = 0;   ///< of the whole stage, from one micro-batch to the next
  double layers_gradient = 0;  ///< of all layers, where they stay until the micro-batch's backward is over
  double head_gradient = 0;    ///< of the head
  bool head_stays = false;     ///< until the backward is over
  double updated = 0;          ///< buffers into which updated weights are gathered
  double last_gradient = 0;    ///< of embedding and head when the backward is over, the cast for the reduction included
  double forward() const { return standing + units * unit; }
  double loss() const { return standing + (units > 0 ? unit : 0); }
  double backward() const { return standing + backward_units * unit; }
  double made() const { return gradient + gradient_stays + (head_stays ? head_gradient : 0); }
};
GatheredBytes gathered_of(const Frame& frame, const StageGroup& group);
/// Weights of a stage that are not trained, as they are held.
struct FrozenBytes {
  double layers = 0, expert = 0, ends = 0;
  double dense() const { return layers + ends; }
  double total() const { return dense() + expert; }
};
FrozenBytes frozen_of(const Frame& frame, const StageGroup& group);
/// Gradients of a stage as they are added up or reduced, where all are there.
double gradient_bytes(const Frame& frame, const StageGroup& group);

Refusal refusal_of(const Prepared::Inside& in, const Point& point);

/// Seconds and wire bytes into `estimate`.
void estimate_time(Frame& frame, Estimate& estimate);
/// Memory of `stage`, which belongs to `group`, at its peak. `host` and `nvme` receive what was offloaded, where not null.
MemoryBytes memory_of(const Frame& frame, const StageGroup& group, int32_t stage, int64_t* host, int64_t* nvme);
/// The peak of a stage with its moment and with the activations by tensor.
StagePeak stage_peak_of(const Frame& frame, const StageGroup& group, int32_t stage, const LayerKey& key);
/// See `allocation_events` and `activations_by_kind`.
std::vector<AllocationEvent> events_of(const Frame& frame, const StageGroup& group, int32_t stage, const LayerKey& key);
std::vector<ActivationItem> items_of(const Frame& frame, const LayerKey& key);
/// The worst stage into `estimate`.
void estimate_memory(const Frame& frame, Estimate& estimate);
/// See `Estimator`.
double least_step_s(const Frame& frame);
double least_device_bytes(const Frame& frame);

}  // namespace shardlab::simulator::analytic
