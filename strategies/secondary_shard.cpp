// hpZ, the hierarchical partition of ZeRO++: backward gathers within a node.
//
// ZeRO-3 gathers parameters from all ranks for forward and again for backward. Here each group of `zero_plus_plus.secondary`
// neighbouring ranks keeps the parameters once more, sharded over itself: when forward's first gather of a step has made a bucket
// whole, each rank of the group keeps its part of it, and every gather that begins in backward takes the parts of the group. No
// value changes within a step, so nothing is rounded and nothing is stale; the next step's forward makes the copy anew. Buckets
// that backward never gathers (tables of embeddings, biases, what is still there from forward) have none.
//
// Along the mesh the group is an axis of its own, "node", within "dp"; slices of ZeRO are cut along both, in the order of ranks.
//
// Shapes   bucket[n], part [n/G]; slices stay [n/N]
// Adds     a copy of each part a step; backward's all-gathers run over G ranks in place of N
// Memory   Psi/G, of the buckets that backward gathers
// Refuses  zero other than 3; a G that is no divisor of dp between the two; hybrid_shard; fsdp.reshard off, where backward gathers
//          nothing
// Paper    Wang et al., "ZeRO++" (2023), section 3.2
#include "strategies/zero_plus_plus.h"

namespace shardlab::strategies {
namespace {

constexpr std::string_view kSecondaryShardName = "secondary-shard";

}  // namespace

BufferId SecondaryShard::shard_of(const Bucket& bucket, BufferId flat) {
  const auto known = shards_.find(bucket.name);
  if (known != shards_.end()) return known->second;
  const int node = draft_.plan.mesh.axis("node");
  Buffer shard = stage_.role.buffers[flat.index()];
  shard.name = bucket.name + ".value.secondary";
  shard.type.shape[0] /= draft_.plan.mesh.size("node");
  shard.type = placed(shard.type, node, Placement::shard(0));
  shard.packed_as = flat.value;
  const BufferId id = add_buffer(stage_, std::move(shard));
  stage_.whole_step.push_back(id);
  return shards_[bucket.name] = id;
}

Call SecondaryShard::keep(const Bucket& bucket, BufferId flat) {
  const BufferId shard = shard_of(bucket, flat);
  Buffer part = stage_.role.buffers[shard.index()];
  part.name = bucket.name + ".value.node";
  part.view = View{flat.value, 0, AxisSet::of(draft_.plan.mesh.axis("node"))};
  const BufferId from = add_buffer(stage_, std::move(part));
  const std::string name = "keep.secondary." + signature(draft_, stage_, bucket);
  const SegmentId segment = draft_.cached(name, [&] {
    Op op;
    op.work = Copy{};
    op.label = "secondary";
    op.stream = stream_;
    op.strategy = kSecondaryShardName;
    return one_op_segment(name, stage_, {from, shard}, std::move(op), {0}, {1});
  });
  return bind(segment, {from, shard});
}

Call SecondaryShard::gather(const Bucket& bucket, BufferId flat) {
  const BufferId shard = shard_of(bucket, flat);
  const std::string name = "gather.secondary." + signature(draft_, stage_, bucket);
  const SegmentId segment = draft_.cached(name, [&] {
    Op op;
    const CommId comm = draft_.comm("dp.secondary", AxisSet::of(draft_.plan.mesh.axis("node")));
    op.work = Collective{CollectiveKind::kAllGather, ReduceOp::kSum, comm, draft_.algorithm()};
    op.label = "parameters";
    op.stream = stream_;
    op.strategy = kSecondaryShardName;
    return one_op_segment(name, stage_, {shard, flat}, std::move(op), {0}, {1});
  });
  return bind(segment, {shard, flat});
}

}  // namespace shardlab::strategies
