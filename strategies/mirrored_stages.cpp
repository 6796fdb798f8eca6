// Mirrored stages (DualPipe): part q of the model lies on stage q and on stage p - 1 - q. Half of the micro-batches go down the
// stages, the other half up, so each of the two finds the gradient of its own half; the sum of the two is the gradient of the step.
// Both make the same update.
//
// Without shards of gradients the sum is formed first, tensor by tensor or bucket by bucket, once backward is done, and reduced
// over data-parallel ranks after that: so every rank's sum over micro-batches is whole before ranks are summed, as
// docs/canonical-order.md has it. Under ZeRO-2 and 3, which reduce every micro-batch, the slices are summed last. In canonical mode
// the two halves are the two subtrees of the sum over micro-batches.
//
// Shapes   as the gradients, or slices of buckets
// Adds     per step an all-reduce of 2 stages of the gradients of both parts: 2 Psi/p elements sent by each rank, 1/N under ZeRO-2
// and 3 Memory   parameters, gradients and states of two parts a stage Refuses  an odd number of stages; fewer than two
// micro-batches; canonical mode where their number is no power of two; compression,
//          parameter servers, workers apart, and parameters on the host, which take gradients before the two halves meet
// Paper    DeepSeek-AI, "DeepSeek-V3" (2024), section 3.2.1
#include "strategies/mirrored_stages.h"

#include <fmt/format.h>

#include <algorithm>

#include "strategies/buckets.h"
#include "strategies/state.h"

namespace shardlab::strategies {
namespace {

constexpr std::string_view kMirroredStagesName = "pipeline";

CommId mirror_comm(Draft& draft, const std::string& name) {
  const int pp = draft.plan.mesh.axis("pp");
  return draft.comm(name, AxisSet::of(pp), mirror_pairs(draft.config.layout.pp));
}

/// `part` with the sum over the two stages in it: a view of its storage.
BufferId whole_of(Draft& draft, StageDraft& stage, BufferId part) {
  Buffer whole = stage.role.buffers[part.index()];
  whole.name += ".mirrored";
  whole.type = placed(whole.type, draft.plan.mesh.axis("pp"), Placement::replicate());
  if (!whole.view) whole.view = View{part.value, 0, {}};
  return add_buffer(stage, std::move(whole));
}

void append_sum(Draft& draft, StageDraft& stage, const std::string& name, const std::string& comm, BufferId part, BufferId whole) {
  const SegmentId segment = draft.cached(name, [&] {
    Op op;
    op.work = Collective{CollectiveKind::kAllReduce, ReduceOp::kSum, mirror_comm(draft, comm), draft.algorithm()};
    op.label = "mirror";
    op.strategy = kMirroredStagesName;
    return one_op_segment(name, stage, {part, whole}, std::move(op), {0}, {1});
  });
  stage.events.push_back(call_event(bind(segment, {part, whole})));
}

}  // namespace

bool has_mirrored_stages(const Draft& draft) { return is_mirrored(draft.config.layout.schedule); }

void sum_buckets_over_mirrors(Draft& draft, StageDraft& stage) {
  if (!has_mirrored_stages(draft) || !draft.training) return;
  for (Bucket& bucket : stage.buckets) {
    const BufferId whole = whole_of(draft, stage, bucket.gradient);
    append_sum(draft, stage, "mirror." + signature(draft, stage, bucket), "pp.mirror", bucket.gradient, whole);
    bucket.gradient = whole;
    for (const Bucket::Member& m : bucket.members) {
      ParameterState& state = stage.at(m.unit, m.parameter);
      state.reduced = whole_of(draft, stage, state.reduced);
    }
  }
}

void sum_slices_over_mirrors(Draft& draft) {
  if (!has_mirrored_stages(draft) || !draft.training) return;
  for (StageDraft& stage : draft.stages)
    for (Bucket& bucket : stage.buckets) {
      const BufferId part = bucket.reduced, whole = whole_of(draft, stage, part);
      append_sum(draft, stage, "mirror.slices." + signature(draft, stage, bucket), "pp.mirror", part, whole);
      bucket.reduced = whole;
      for (Update& update : stage.updates)
        if (update.gradient == part) update.gradient = whole;
    }
}

BufferId sum_scalar_over_mirrors(Draft& draft, StageDraft& stage, BufferId part) {
  const BufferId whole = whole_of(draft, stage, part);
  append_sum(draft, stage, stage.role.buffers[whole.index()].name, "metrics.mirror", part, whole);
  return whole;
}

BufferId sum_loads_over_mirrors(Draft& draft, StageDraft& stage, BufferId part) {
  const BufferId whole = whole_of(draft, stage, part);
  const Buffer& loads = stage.role.buffers[whole.index()];
  append_sum(draft, stage, fmt::format("{}.{}", loads.name, loads.type.shape.elements()), "router.load.mirror", part, whole);
  return whole;
}

bool counts_in_norm(const Draft& draft, const StageDraft& stage, int unit) {
  if (!has_mirrored_stages(draft)) return true;
  return std::ranges::any_of(
      stage.parts, [&](const PartDraft& p) { return p.part == stage.role.stage && p.first_unit <= unit && unit < p.end_unit; });
}

}  // namespace shardlab::strategies
