// The guard: a step is given up, or the run stopped, whose gradients hold an infinity or a NaN, or whose loss or gradient norm is
// far above its running mean.
//
// Non-finite: each rank looks at the gradients that it would update with and notes the first bad one (`guard.where`, its number in
// the op's reads plus 1), so that the message names rank and tensor; the flag is the greatest over all that hold other slices or
// stages. Spikes: the running mean takes in x by mean += (x - mean) / min(seen, window) in steps that update, so that a spike does
// not raise the mark it is judged by; while fewer than `window` have been seen nothing is judged. The norm is known to all ranks,
// the loss to the last stage, whose verdict is made known over pp. Mean and count are state of the run: checkpoints carry them.
// Whether a fault stops the run or skips the update, the update is left out: what is saved or looked at afterwards is sound.
//
// Shapes   flags, means and counts [1]
// Adds     non-finite: one i32 all-reduced (maximum) over tp, over dp under ZeRO, over pp; losses: one i32 over pp; norms: those of
//          the gradient norm
// Memory   a few bytes
// Refuses  non-finite with fp16, whose loss scale skips such steps by itself (`check`)
// Source   llm.c, llmc/outlier_detector.h (deviation of loss and norm from a window); Chowdhery et al., "PaLM" (2022), section 5.1
//          (spikes skipped)
#include "strategies/guard.h"

#include "plan/named_kernels.h"
#include "plan/techniques.h"
#include "strategies/optimizer.h"
#include "strategies/post_validation.h"
#include "strategies/skipped_update.h"

namespace shardlab::strategies {
namespace {

constexpr std::string_view kGuardName = "guard";

class Guarding {
 public:
  Guarding(Draft& draft, StageDraft& stage)
      : draft_(draft), stage_(stage), guard_(draft.config.train.guard), numbers_(draft, stage, kGuardName) {}

  void run() {
    declare_updates(draft_, stage_);
    if (validates_later(draft_.config)) {
      stage_.named[std::string(kValidatedFlag)] = numbers_.found_inf();
      return;
    }
    if (guard_.nonfinite != GuardAction::kNone) stage_.flags.push_back(numbers_.found_inf("guard.where"));
    if (guard_.spike == GuardAction::kNone) return;
    if (guard_.norm_factor > 0) judge("norm", squared_gradient_norm(draft_, stage_), guard_.norm_factor);
    if (guard_.loss_factor > 0) judge_loss();
  }

 private:
  /// Flags x where it is a spike, and takes it into the mean where the step updates.
  BufferId judge(const std::string& what, BufferId x, float most) {
    const std::string name = "guard." + what;
    const BufferId mean = numbers_.number(name + ".mean", DType::f32, true),
                   seen = numbers_.number(name + ".seen", DType::i32, true), factor = numbers_.number(name + ".factor"),
                   window = numbers_.number(name + ".window"), spike = verdict(name + ".spike");
    numbers_.append(name + ".factor", {factor}, Fill{most}, {}, {0});
    numbers_.append(name + ".window", {window}, Fill{static_cast<float>(guard_.window)}, {}, {0});
    numbers_.append(name + ".judge", {x, mean, seen, factor, window, spike}, named("judge_spike"), {0, 1, 2, 3, 4}, {5});
    for (const auto& [part, id] : {std::pair{".of", x}, {".window", window}, {".mean", mean}, {".seen", seen}})
      stage_.named[name + part] = id;
    stage_.flags.push_back(spike);
    return spike;
  }

  /// A metric, which lives on for whoever asks why a step was skipped.
  BufferId verdict(std::string name) {
    const BufferId id = numbers_.number(std::move(name), DType::i32, true);
    stage_.role.buffers[id.index()].kind = BufferClass::kMetric;
    return id;
  }

  void judge_loss() {
    const bool last = stage_.holds(draft_.unit_count() - 1);
    const bool stages = draft_.config.layout.pp > 1;
    BufferId flag;
    if (last) {
      flag = judge("loss", step_loss(draft_, stage_), guard_.loss_factor);
      stage_.flags.pop_back();
    }
    if (!stages) return stage_.flags.push_back(flag);
    // The other stages have no say: theirs is 0.
    const int pp = draft_.plan.mesh.axis("pp");
    const BufferId said = numbers_.number("guard.loss.said", DType::i32);
    Type& type = stage_.role.buffers[said.index()].type;
    type = placed(type, pp, Placement::partial());
    if (last)
      numbers_.append("guard.loss.said", {flag, said}, named("any"), {0}, {1});
    else
      numbers_.append("guard.loss.said", {said}, Fill{0}, {}, {0});
    stage_.flags.push_back(all_reduce_scalar(draft_, stage_, said, "pp", ReduceOp::kMax));
  }

  Draft& draft_;
  StageDraft& stage_;
  const Guard& guard_;
  StageNumbers numbers_;
};

}  // namespace

void guard(Draft& draft) {
  for (StageDraft& stage : draft.stages) Guarding(draft, stage).run();
}

void take_into_means(Draft& draft, StageDraft& stage) {
  const StageNumbers numbers(draft, stage, kGuardName);
  for (const std::string name : {"guard.norm", "guard.loss"}) {
    if (!stage.named.contains(name + ".of")) continue;
    const auto part = [&](const char* suffix) { return stage.named.at(name + suffix); };
    numbers.append(name + ".mean", {part(".of"), part(".window"), part(".mean"), part(".seen")}, named("running_mean"),
                   {0, 1, 2, 3}, {2, 3}, stage.go);
  }
}

}  // namespace shardlab::strategies
