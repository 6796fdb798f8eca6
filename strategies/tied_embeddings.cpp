// Tied embeddings: the head multiplies by the embedding's table, so the table has two gradients, which are added exactly once.
//
// Where both ends are on one stage and nothing asks for the canonical order, the two are added before they are reduced over
// data-parallel ranks, so the table travels once. In canonical mode every layout adds them last, after each has been summed over
// everything; and so does what scatters gradients as backward makes them (ZeRO-2 and 3), since one end's have gone when the other's
// are made. Across stages each end reduces its own share (or its ZeRO slice of it), and an all-reduce between the first and the
// last stage adds the two, after which both ends make the same update. (Adding before the slices are cut is the bug of Megatron-LM
// issue 844.)
//
// Shapes   table[V/t, h], or the slice of it that the rank updates
// Adds     across stages an all-reduce of 2 ranks: V h / t elements sent by each end (1/N of it under ZeRO-1)
// Memory   a second gradient of the table, in every layout
// Refuses  nothing
// Paper    Press & Wolf, "Using the Output Embedding" (2017); Narayanan et al., "Megatron-LM" (2021)
#include "strategies/tied_embeddings.h"

#include <algorithm>

#include "plan/pipeline_case.h"
#include "plan/techniques.h"
#include "strategies/state.h"

namespace shardlab::strategies {
namespace {

constexpr std::string_view kTiedEmbeddingsName = "tied-embeddings";

bool adds_early(const Draft& draft) { return tied_gradients_meet_early(draft.config); }

int head_parameter(Draft& draft) { return static_cast<int>(draft.of(UnitKind::kHead).parameters.size()) - 1; }

/// embedding + head, in place of the embedding's.
Event add_head(Draft& draft, StageDraft& stage, BufferId embedding, BufferId head) {
  const SegmentId segment = draft.cached("tie.add", [&] {
    Op op;
    op.work = Add{};
    op.label = "embed.tokens";
    op.strategy = kTiedEmbeddingsName;
    return one_op_segment("tie.add", stage, {embedding, head}, std::move(op), {0, 1}, {0});
  });
  Event event;
  event.unit = 0;
  event.micro_batch = draft.micro_batches() - 1;
  event.call = bind(segment, {embedding, head});
  return event;
}

/// What the optimizer would read for the table on a stage: the bucket's slice under ZeRO, else the gradient itself.
BufferId reduced_table(StageDraft& stage, int unit, int parameter) {
  for (const Bucket& bucket : stage.buckets)
    if (bucket.tied && bucket.members.front().unit == unit && stage.role.buffers[bucket.reduced.index()].packed_as >= 0)
      return bucket.reduced;
  return stage.at(unit, parameter).reduced;
}

/// The stages with the embedding and with the head, every other by itself.
Groups ends_of(Draft& draft) {
  const int first = draft.embedding_stage().role.stage, last = draft.head_stage().role.stage;
  Groups groups{{std::min(first, last), std::max(first, last)}};
  for (int stage = 0; stage < draft.config.layout.pp; ++stage)
    if (stage != first && stage != last) groups.push_back({stage});
  return groups;
}

/// The all-reduce between the two ends; what it leaves is a view with the whole type.
void reduce_over_ends(Draft& draft, StageDraft& stage, int unit, int parameter) {
  const int pp = draft.plan.mesh.axis("pp");
  const BufferId part = reduced_table(stage, unit, parameter);
  Buffer sum = stage.role.buffers[part.index()];
  sum.name = "embed.tokens.grad.tied";
  sum.type = placed(sum.type, pp, Placement::replicate());
  if (!sum.view) sum.view = View{part.value, 0, {}};
  const BufferId whole = add_buffer(stage, std::move(sum));
  const SegmentId segment = draft.cached("tie.ends", [&] {
    Op op;
    op.work = Collective{CollectiveKind::kAllReduce, ReduceOp::kSum, draft.comm("pp.ends", AxisSet::of(pp), ends_of(draft)),
                         draft.algorithm()};
    op.label = "embed.tokens";
    op.strategy = kTiedEmbeddingsName;
    return one_op_segment("tie.ends", stage, {part, whole}, std::move(op), {0}, {1});
  });
  Event event;
  event.unit = unit;
  event.micro_batch = draft.micro_batches() - 1;
  event.call = bind(segment, {part, whole});
  stage.events.push_back(std::move(event));
  stage.at(unit, parameter).reduced = whole;
  if (unit != 0) stage.counted_elsewhere = whole;
  for (Update& update : stage.updates)
    if (update.gradient == part) update.gradient = whole;
}

}  // namespace

void tie_before_reduction(Draft& draft) {
  if (!adds_early(draft)) return;
  const int head = draft.unit_count() - 1;
  for (StageDraft& stage : draft.stages) {
    if (!stage.holds(0)) continue;
    ParameterState& second = stage.at(head, head_parameter(draft));
    second.merged = true;
    stage.events.push_back(add_head(draft, stage, stage.at(0, 0).gradient, second.gradient));
  }
}

void tie_after_reduction(Draft& draft) {
  if (adds_early(draft)) return;
  const int head = draft.unit_count() - 1, parameter = head_parameter(draft);
  if (StageDraft& stage = draft.embedding_stage(), &other = draft.head_stage(); &other != &stage) {
    reduce_over_ends(draft, stage, 0, 0);
    reduce_over_ends(draft, other, head, parameter);
    return;
  }
  for (StageDraft& stage : draft.stages) {
    if (!stage.holds(0)) continue;
    stage.at(head, parameter).merged = true;
    stage.events.push_back(add_head(draft, stage, reduced_table(stage, 0, 0), reduced_table(stage, head, parameter)));
  }
}

}  // namespace shardlab::strategies
