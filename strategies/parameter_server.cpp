// Parameter server: servers keep the parameters and the optimizer's state; workers push gradients to them and pull what they made
// of these. Synchronous, or with bounded staleness.
//
// Every data-parallel rank is a worker and, beside it, the server of one slice of every bucket: the colocated form, in which S = N
// servers share what comes in and goes out evenly. (Servers on other ranks, or on some of the workers', would give the ranks of one
// stage different programs: what a plan says once for all of them.) A worker pushes each server its part of a bucket by a
// message of its own, no matter which algorithm collectives take: no part passes through a third rank. A server adds the N parts
// up in the order of workers, by the canonical tree, updates its slice, and every worker pulls the slice as a message again.
// Colocated and in step this moves and keeps what ZeRO-1 does, which is where ZeRO-1's two collectives come from; what differs is
// the way that the bytes take, N - 1 messages at once from and to each rank in place of a ring's N - 1 in a row.
//
// With a staleness s the same pushes, updates and pulls are not of one step: a server applies gradients as they arrive, and a
// worker may be s steps ahead of the slowest (runtime/parameter_servers.h says how; the plan says what a step is, not when). For
// that a server has a copy of what it serves, since the worker beside it goes on computing with the values that it pulled, a
// place of its own to add gradients up in, and a stream of its own. Each worker knows its own part of the loss; they are added up
// after the run.
//
// Shapes   bucket[n], slices [n/N]
// Adds     push and pull of Psi (N-1)/N each, direct
// Memory   moments 1/N, with the servers; workers keep none. With a staleness: what is served and its gradients, Psi/N each
// Refuses  dp = 1, servers other than dp, ZeRO, compression. With a staleness: workers of several ranks, transports of devices,
//          what needs all gradients of a step at once (norms, guards, a loss scale), tied tables, checkpoints
// Paper    Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (2014), section 3; Jiang et al., "A Unified
//          Architecture for Accelerating Distributed DNN Training" (BytePS, 2020), section 3; Ho et al., "More Effective
//          Distributed ML via a Stale Synchronous Parallel Parameter Server" (2013)
#include "strategies/parameter_server.h"

#include "plan/run_state.h"
#include "plan/techniques.h"
#include "strategies/shards.h"

namespace shardlab::strategies {
namespace {

constexpr std::string_view kParameterServerName = "parameter-server";

/// A message from each rank to each other: what a push and a pull have in common.
Call exchange(Draft& draft, const StageDraft& stage, const Bucket& bucket, CollectiveKind kind, BufferId from, BufferId to) {
  const bool push = kind == CollectiveKind::kReduceScatter;
  const std::string name = (push ? "push." : "pull.") + signature(draft, stage, bucket);
  const SegmentId segment = draft.cached(name, [&] {
    const AxisSet dp = AxisSet::of(draft.plan.mesh.axis("dp"));
    Op op;
    op.work = Collective{kind, ReduceOp::kSum, draft.comm(push ? "dp.grads" : "dp.parameters", dp), Algorithm::kDirect};
    op.stream = reduction_stream(draft);
    op.label = push ? "gradients" : "parameters";
    op.strategy = kParameterServerName;
    return one_op_segment(name, stage, {from, to}, std::move(op), {0}, {1});
  });
  return bind(segment, {from, to});
}

/// The server's own parameters, apart from the values with which the worker beside it computes: an fp32 copy. 16-bit values are
/// rounded from it where they compute (`master_weights` then makes the copy).
BufferId served_apart(StageDraft& stage, Shards& shards, const Bucket& bucket, BufferId values) {
  const BufferId id = shards.slice_apart(values, bucket.name + ".value.served");
  Buffer& served = stage.role.buffers[id.index()];
  if (served.type.dtype == DType::f32) served.kind = BufferClass::kMaster;
  return id;
}

/// Where a server adds gradients up: at any time, and so for good.
BufferId sum_apart(StageDraft& stage, Shards& shards, const Bucket& bucket) {
  const BufferId id = shards.slice_apart(bucket.gradient, bucket.name + ".sum");
  Buffer& sum = stage.role.buffers[id.index()];
  sum.kind = BufferClass::kBuffer;
  sum.persistent = true;
  return id;
}

/// One update a bucket, of the slice that this rank serves.
void serve(Draft& draft, StageDraft& stage, Shards& shards) {
  for (const Bucket& bucket : stage.buckets) {
    if (shards.shares_values(bucket)) continue;
    const BufferId values = shards.flat_values(bucket, true);
    Update update;
    update.gradient = bucket.reduced;
    update.value = runs_apart(draft.config) ? served_apart(stage, shards, bucket, values)
                                            : shards.slice_of(values, bucket.name + ".value.served");
    update.decay = bucket.decay;
    update.after = exchange(draft, stage, bucket, CollectiveKind::kAllGather, update.value, values);
    stage.updates.push_back(std::move(update));
  }
}

}  // namespace

StreamId update_stream(Draft& draft) { return runs_apart(draft.config) ? draft.stream(kServerStream) : StreamId(0); }

void parameter_server(Draft& draft) {
  for (StageDraft& stage : draft.stages) {
    Shards shards(draft, stage, kParameterServerName);
    fill_buckets(draft, stage, {.multiple = shards.ranks(), .bytes = draft.config.layout.bucket_bytes});
    for (Bucket& bucket : stage.buckets)
      bucket.reduced =
          runs_apart(draft.config) ? sum_apart(stage, shards, bucket) : shards.slice_of(bucket.gradient, bucket.name + ".sum");
    when_complete(draft, stage, [&](Bucket& bucket) {
      return call_event(exchange(draft, stage, bucket, CollectiveKind::kReduceScatter, bucket.gradient, bucket.reduced),
                        bucket.last_unit, draft.micro_batches() - 1);
    });
    serve(draft, stage, shards);
  }
}

}  // namespace shardlab::strategies
