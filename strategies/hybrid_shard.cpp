// Hybrid sharding (HSDP): ZeRO's shards lie within sets of `hybrid_shard` ranks (the axis "dp"), and the sets are replicas of
// one another (the axis "replica"). Once a step the rank's slice of each bucket's gradients, which its set has summed, is
// summed over the sets.
//
// Shapes   slices [n/N], N ranks in a set
// Adds     per bucket and step an all-reduce of the slice over the sets: 2 Psi/N (sets-1)/sets
// Memory   nothing: in place
// Refuses  sets that do not divide dp
// Paper    Zhao et al., "PyTorch FSDP" (2023), section 3.2.2
#include "strategies/hybrid_shard.h"

#include <algorithm>

#include "strategies/buckets.h"

namespace shardlab::strategies {
namespace {

constexpr std::string_view kHybridShardName = "hybrid-shard";

/// The last event that is about a buffer: it has its value of the step from there on.
size_t last_call_on(const StageDraft& stage, BufferId buffer) {
  for (size_t i = stage.events.size(); i-- > 0;) {
    const Event& e = stage.events[i];
    if (e.kind == Event::Kind::kCall && std::ranges::find(e.call.binding, buffer) != e.call.binding.end()) return i;
  }
  SHARDLAB_CHECK(false, "stage {} never reduces a bucket's gradients", stage.role.stage);
}

Event reduce_over_sets(Draft& draft, StageDraft& stage, const Bucket& bucket, int axis, BufferId part, BufferId whole) {
  const std::string name = "replicas." + signature(draft, stage, bucket);
  const SegmentId segment = draft.cached(name, [&] {
    Op op;
    op.work =
        Collective{CollectiveKind::kAllReduce, ReduceOp::kSum, draft.comm("dp.replicas", AxisSet::of(axis)), draft.algorithm()};
    op.label = "gradients";
    op.stream = reduction_stream(draft);
    op.strategy = kHybridShardName;
    return one_op_segment(name, stage, {part, whole}, std::move(op), {0}, {1});
  });
  return call_event(bind(segment, {part, whole}), bucket.last_unit, draft.micro_batches() - 1);
}

}  // namespace

void hybrid_shard(Draft& draft) {
  const auto sets = draft.plan.mesh.find("replica");
  if (!sets || !draft.training) return;
  for (StageDraft& stage : draft.stages) {
    Insertions insertions;
    for (Bucket& bucket : stage.buckets) {
      const BufferId part = bucket.reduced;
      Buffer whole = stage.role.buffers[part.index()];
      whole.name += ".replicas";
      whole.type = placed(whole.type, *sets, Placement::replicate());
      if (!whole.view) whole.view = View{part.value, 0, {}};
      bucket.reduced = add_buffer(stage, std::move(whole));
      insertions.after(last_call_on(stage, part), reduce_over_sets(draft, stage, bucket, *sets, part, bucket.reduced));
      for (Update& update : stage.updates)
        if (update.gradient == part) update.gradient = bucket.reduced;
    }
    insertions.apply(stage.events);
  }
}

}  // namespace shardlab::strategies
