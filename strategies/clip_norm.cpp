// Clipping by the global norm: every gradient is multiplied by min(1, clip_norm / (norm + 1e-6)), the norm that of
// all gradients together.
//
// The squared norm counts each element once under every layout: slices (tensor parallel, ZeRO) are summed over the axes that cut
// them, copies are counted on one rank, a tied table at one of its two ends. It is an fp64 sum, so that the factor, which is
// rounded to fp32, does not depend on the order of summation but where the sum lies within its own rounding error, some 1e-15, of
// where the factor's rounding changes. The factor is one number, equal on all ranks (`verify` demands it), which the updates read:
// no gradient is written again.
//
// Shapes   factor [1]
// Adds     the reductions of one fp64 over tp, over dp under ZeRO, over pp: all ranks wait for all before the first update
// Memory   a few bytes
// Refuses  nothing
// Paper    Pascanu et al., "On the Difficulty of Training Recurrent Neural Networks" (2013), section 3.2
#include "strategies/clip_norm.h"

#include "plan/named_kernels.h"
#include "plan/techniques.h"
#include "strategies/diloco.h"
#include "strategies/draft.h"
#include "strategies/optimizer.h"

namespace shardlab::strategies {
namespace {

constexpr std::string_view kClipNormName = "clip-norm";

BufferId number(StageDraft& stage, std::string name, Type type = {}) {
  Buffer b;
  b.name = std::move(name);
  b.type = std::move(type);
  b.type.shape = {1};
  b.kind = BufferClass::kOther;
  const BufferId id = add_buffer(stage, std::move(b));
  stage.whole_step.push_back(id);
  return id;
}

/// The type of the clip factor: the same on every rank, or, for workers that train apart, one on each worker.
Type factor_type(const Draft& draft) {
  return trains_apart(draft) ? placed({}, draft.plan.mesh.axis("dp"), Placement::local()) : Type{};
}

void append(Draft& draft, StageDraft& stage, std::string name, const std::vector<BufferId>& buffers, Work work,
            const std::vector<int>& reads, int write) {
  const SegmentId segment = draft.cached(name + "." + std::to_string(stage.role.stage), [&] {
    Op op;
    op.work = std::move(work);
    op.label = name;
    op.strategy = kClipNormName;
    return one_op_segment(name, stage, buffers, std::move(op), reads, {write});
  });
  stage.events.push_back(call_event(bind(segment, buffers)));
}

}  // namespace

void clip_norm(Draft& draft) {
  for (StageDraft& stage : draft.stages) {
    declare_updates(draft, stage);
    if (validates_later(draft.config)) {  // updates take the factor to be 1
      squared_gradient_norm(draft, stage);
      continue;
    }
    const BufferId norm = squared_gradient_norm(draft, stage), most = number(stage, "clip.norm"),
                   factor = number(stage, "clip.factor", factor_type(draft));
    append(draft, stage, "clip.norm", {most}, Fill{draft.config.train.clip_norm}, {}, 0);
    append(draft, stage, "clip.factor", {norm, most, factor}, named("clip_factor"), {0, 1}, 2);
    if (stage.unscale) {  // one factor does both
      const BufferId both = number(stage, "clip.unscale");
      stage.role.buffers[both.index()].type = stage.role.buffers[stage.unscale.index()].type;
      append(draft, stage, "clip.unscale", {factor, stage.unscale, both}, named("multiply"), {0, 1}, 2);
      stage.gradient_factor = both;
    } else {
      stage.gradient_factor = factor;
    }
  }
}

}  // namespace shardlab::strategies
