// DualPipe: every part of the model lies on two stages, q and p - 1 - q; half of the micro-batches go down through one, half up through the
// other. So each parameter's gradient is the sum of what a stage and its mirror image find, which an all-reduce between the two makes
// whole, after which both make the same update.
//
// The all-reduce comes after what reduces over data-parallel ranks, of whole gradients or of the slices of ZeRO, and after all of backward:
// the two stages finish their parts in different orders, and what travels between them must be issued in one.
//
// Shapes   flat buckets of gradients [n], or slices of them [n/N]
// Adds     an all-reduce of 2 ranks of all gradients of the stage: 2 Psi/p elements sent by each (1/N of it under ZeRO)
// Memory   parameters, gradients and moments of two parts: 2/p
// Refuses  an odd number of stages; compression, a parameter server, DiLoCo (`check`)
// Paper    DeepSeek-AI, "DeepSeek-V3" (2024), section 3.2.1
#include "strategies/mirrored_stages.h"

#include "strategies/buckets.h"
#include "strategies/draft.h"
#include "strategies/state.h"

namespace shardlab::strategies {
namespace {

constexpr std::string_view kName = "mirrored-stages";

class Mirror {
 public:
  Mirror(Draft& draft, StageDraft& stage) : draft_(draft), stage_(stage), pp_(draft.plan.mesh.axis("pp")) {}

  void run() {
    if (stage_.buckets.empty()) {
      fill_buckets(draft_, stage_, {.bytes = draft_.config.layout.bucket_bytes});
      for (Bucket& bucket : stage_.buckets) bucket.reduced = bucket.gradient;
    }
    for (Bucket& bucket : stage_.buckets) reduce(bucket);
    // A parameter that both hold is counted once: where its micro-batches go down.
    for (const Bucket& bucket : stage_.buckets)
      for (const Bucket::Member& m : bucket.members)
        if (!goes_down(m.unit)) stage_.counted_elsewhere.insert(counted(bucket, m));
  }

 private:
  bool goes_down(int unit) const {
    for (const PartDraft& part : stage_.parts)
      if (unit >= part.first_unit && unit < part.end_unit) return part.part == stage_.role.stage;
    return false;
  }

  /// What a norm reads of a member: the bucket's slice, or the gradient itself.
  BufferId counted(const Bucket& bucket, const Bucket::Member& m) const {
    return slices(bucket) ? bucket.reduced : stage_.at(m.unit, m.parameter).reduced;
  }
  bool slices(const Bucket& bucket) const { return stage_.role.buffers[bucket.reduced.index()].packed_as >= 0; }

  BufferId whole_of(BufferId part, std::string name) {
    Buffer whole = stage_.role.buffers[part.index()];
    whole.name = std::move(name);
    whole.type = placed(whole.type, pp_, Placement::replicate());
    if (!whole.view) whole.view = View{part.value, 0, {}};
    return add_buffer(stage_, std::move(whole));
  }

  void reduce(Bucket& bucket) {
    const BufferId part = bucket.reduced;
    const bool sliced = slices(bucket);
    bucket.reduced = whole_of(part, stage_.role.buffers[part.index()].name + ".mirrored");
    const std::string name = "mirror." + signature(draft_, stage_, bucket);
    const SegmentId segment = draft_.cached(name, [&] {
      Op op;
      op.work = Collective{CollectiveKind::kAllReduce, ReduceOp::kSum,
                           draft_.comm("pp.mirror", AxisSet::of(pp_), mirror_pairs(draft_.config.layout.pp)), draft_.algorithm()};
      op.label = "gradients";
      op.strategy = kName;
      return one_op_segment(name, stage_, {part, bucket.reduced}, std::move(op), {0}, {1});
    });
    stage_.events.push_back(call_event(bind(segment, {part, bucket.reduced}), bucket.last_unit, draft_.micro_batches() - 1));
    for (Update& update : stage_.updates)
      if (update.gradient == part) update.gradient = bucket.reduced;
    if (sliced) return;
    for (const Bucket::Member& m : bucket.members) {
      ParameterState& state = stage_.at(m.unit, m.parameter);
      state.reduced = whole_of(state.reduced, state_name(draft_, m.unit, m.parameter) + ".grad.mirrored");
    }
  }

  Draft& draft_;
  StageDraft& stage_;
  int pp_;
};

}  // namespace

void reduce_over_mirrors(Draft& draft) {
  for (StageDraft& stage : draft.stages) Mirror(draft, stage).run();
}

}  // namespace shardlab::strategies
