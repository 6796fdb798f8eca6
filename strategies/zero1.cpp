// ZeRO stage 1 (distributed optimizer): every data-parallel rank keeps the optimizer state of 1/N of the parameters.
//
// Gradients and parameters live in flat buckets padded to a multiple of N. A bucket's gradients are reduce-scattered: each rank
// gets the sum for its slice, updates that slice of the parameters with its slice of the moments, and an all-gather makes the
// parameters whole again.
//
// Shapes   bucket[n], slices [n/N]
// Adds     reduce-scatter of the gradients and all-gather of the parameters: Psi (N-1)/N each, together what data parallelism sends
// Memory   moments 1/N
// Refuses  dp = 1
// Paper    Rajbhandari et al., "ZeRO" (2020), section 5.1
#include "strategies/zero1.h"

#include "strategies/buckets.h"
#include "strategies/state.h"

namespace shardlab {
namespace {

constexpr std::string_view kName = "zero-1";

class ZeroOne {
 public:
  ZeroOne(Draft& draft, StageDraft& stage)
      : draft_(draft), stage_(stage), axis_(draft.plan.mesh.axis("dp")), ranks_(draft.config.layout.dp), dp_(AxisSet::of(axis_)) {}

  void run() {
    fill_buckets(draft_, stage_, ranks_);
    for (Bucket& bucket : stage_.buckets) {
      bucket.reduced = shard_of(bucket.gradient, bucket.name + ".sum");
      add_update(bucket);
    }
    insert_when_complete(draft_, stage_, [&](const Bucket& bucket) { return reduce_scatter(bucket); });
  }

 private:
  /// This rank's slice of a flat buffer, as a view of it.
  BufferId shard_of(BufferId flat, std::string name) {
    Buffer shard = stage_.role.buffers[flat.index()];
    shard.name = std::move(name);
    shard.type.shape = {shard.type.shape[0] / ranks_};
    shard.type = placed(shard.type, axis_, Placement::shard(0));
    shard.view = View{flat.value, 0, dp_};
    return add_buffer(stage_, std::move(shard));
  }

  /// The flat buffer of a bucket's parameter values; the parameters become views of it.
  BufferId gather_values(const Bucket& bucket) {
    const ParameterState& first = stage_.at(bucket.members[0].unit, bucket.members[0].parameter);
    Buffer flat = stage_.role.buffers[first.value.index()];
    flat.name = bucket.name + ".value";
    flat.type.shape = {bucket.elements};
    flat.type.place = stage_.role.buffers[bucket.gradient.index()].type.place;
    for (Placement& p : flat.type.place)
      if (p.is_partial()) p = Placement::replicate();
    flat.parameter = -1;
    const BufferId id = add_buffer(stage_, std::move(flat));
    for (const Bucket::Member& m : bucket.members) {
      Buffer& value = stage_.role.buffers[stage_.at(m.unit, m.parameter).value.index()];
      value.view = View{id.value, m.offset, {}};
    }
    return id;
  }

  /// A bucket that shares its table with another (the head's copy on the embedding's stage) is updated through that one.
  void add_update(const Bucket& bucket) {
    if (bucket.tied && bucket.members.front().unit != 0 && stage_.holds(0)) return;
    const BufferId values = gather_values(bucket);
    const BufferId shard = shard_of(values, bucket.name + ".value.shard");
    Update update;
    update.gradient = bucket.reduced;
    update.value = shard;
    update.decay = bucket.decay;
    const std::string name = "gather." + signature(draft_, stage_, bucket);
    const SegmentId segment = draft_.cached(name, [&] {
      Op op;
      op.work = Collective{CollectiveKind::kAllGather, ReduceOp::kSum, draft_.comm("dp.parameters", dp_), draft_.algorithm()};
      op.label = "parameters";
      op.stream = reduction_stream(draft_);
      op.strategy = kName;
      return one_op_segment(name, stage_, {shard, values}, std::move(op), {0}, {1});
    });
    update.after = bind(segment, {shard, values});
    stage_.updates.push_back(std::move(update));
  }

  Event reduce_scatter(const Bucket& bucket) {
    const std::string name = "scatter." + signature(draft_, stage_, bucket);
    const SegmentId segment = draft_.cached(name, [&] {
      Op op;
      op.work = Collective{CollectiveKind::kReduceScatter, ReduceOp::kSum, draft_.comm("dp.grads", dp_), draft_.algorithm()};
      op.stream = reduction_stream(draft_);
      op.label = "gradients";
      op.strategy = kName;
      return one_op_segment(name, stage_, {bucket.gradient, bucket.reduced}, std::move(op), {0}, {1});
    });
    Event event;
    event.unit = bucket.last_unit;
    event.micro_batch = draft_.micro_batches() - 1;
    event.call = bind(segment, {bucket.gradient, bucket.reduced});
    return event;
  }

  Draft& draft_;
  StageDraft& stage_;
  int axis_;
  int ranks_;
  AxisSet dp_;
};

}  // namespace

void zero1(Draft& draft) {
  for (StageDraft& stage : draft.stages) ZeroOne(draft, stage).run();
}

}  // namespace shardlab
