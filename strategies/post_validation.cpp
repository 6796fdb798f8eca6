// Post-validation: no pipeline stage waits for another before it updates.
//
// Clipping and the guard make all stages meet between the last backward of a step and the first update. A schedule whose stages
// begin late and end late (ZB-H2, ZB-V) then idles once a step, however full it is within. Here each stage updates at once, as if
// the factor of clipping were 1 and the gradients finite. K steps are one period of the plan. The norm and the flag of each step
// are reduced over the stages on a stream of their own, beside the steps that follow. The end of the period waits for them. Where
// any step was to be clipped or given up, every stage takes back all K steps: parameters, moments and whatever else is kept from
// step to step become what they were when the period began, to the bit. The run then makes the same steps under the plan of one
// step in which all stages meet (runtime/made_again.h). So every run has the bits of the run without this technique: an
// update by a factor of exactly 1 is an update without a factor.
//
// The paper takes back one step, by the inverse of its update, in the warm-up of the next. An inverse loses bits, and of a moment
// with a beta of 0 there is none. A copy loses nothing, and one serves all steps of a period.
//
// Sums over tp, and under ZeRO over dp, stay in the step: ranks of one stage meet there in any case.
//
// Shapes   kept copies as the state; a number a step
// Adds     nothing; one fp64 (clipping) and one i32 (guard) over pp a step, as before, but beside the compute stream
// Memory   a copy of all state: 4 bytes a parameter and 8 of moments (AdamW, fp32), cut as the state is
// Refuses  pp = 1 and steps without clipping and guard, which wait for nobody; spikes and fp16, whose verdicts go by earlier steps;
//          an optimizer on the host; parameter servers; DiLoCo and 1-bit Adam, which have a period or a second plan of their own
// Paper    Qi et al., "Zero Bubble Pipeline Parallelism" (2023), section 4
#include "strategies/post_validation.h"

#include <fmt/format.h>

#include <map>
#include <utility>
#include <vector>

#include "plan/named_kernels.h"
#include "plan/run_state.h"
#include "plan/techniques.h"
#include "plan/text.h"
#include "strategies/draft.h"
#include "strategies/repeated_step.h"
#include "strategies/skipped_update.h"

namespace shardlab::strategies {
namespace {

constexpr std::string_view kPostValidationName = "post-validation";

/// Whether a buffer holds what the next step goes on from.
bool is_kept(const Buffer& b) {
  return b.persistent && !b.view && b.kind != BufferClass::kMetric && b.kind != BufferClass::kWorkspace;
}

class Period {
 public:
  Period(Draft& draft, StageDraft& stage)
      : draft_(draft),
        stage_(stage),
        steps_(static_cast<int>(draft.config.train.post_validation)),
        numbers_(draft, stage, kPostValidationName) {}

  void run() {
    const std::vector<Event> step = std::move(stage_.events);
    stage_.events.clear();
    keep();
    widen_loss();
    for (int i = 0; i < steps_; ++i) repeat_step(stage_, step, i, numbers_of(i));
    const BufferId rolled_back = judge();
    for (const auto& [state, copy] : kept_) copy_state("restore", copy, state, StreamId(0), rolled_back);
    report_norms();
  }

 private:
  Buffer& buffer(BufferId id) { return stage_.role.buffers[id.index()]; }

  /// Copies all state, beside the first forwards: the first update waits for it.
  void keep() {
    for (size_t i = 0; i < stage_.role.buffers.size(); ++i) {
      Buffer copy = stage_.role.buffers[i];
      if (!is_kept(copy)) continue;
      copy.name += ".kept";
      copy.persistent = false;
      copy.parameter = copy.packed_as = -1;
      const BufferId state(static_cast<int32_t>(i)), id = add_buffer(stage_, std::move(copy));
      stage_.whole_step.push_back(id);
      kept_.emplace_back(state, id);
      copy_state("keep", state, id, meeting_stream(draft_), {});
    }
  }

  /// Buffers of one type and class share a segment.
  void copy_state(std::string_view what, BufferId from, BufferId to, StreamId stream, BufferId when) {
    std::vector<BufferId> buffers{from, to};
    if (when) buffers.push_back(when);
    const std::string key = fmt::format("{} {} {}", what, name_of(buffer(to).kind), print(buffer(to).type, draft_.plan.mesh));
    const SegmentId segment = draft_.cached(key, [&] {
      Op op;
      op.work = Copy{.restores = static_cast<bool>(when)};
      op.stream = stream;
      op.label = what;
      op.strategy = kPostValidationName;
      if (when) op.when = SlotId(2);
      return one_op_segment(fmt::format("{}{}", what, draft_.segment_cache.size()), stage_, buffers, std::move(op), {0}, {1});
    });
    stage_.events.push_back(call_event(bind(segment, std::move(buffers))));
  }

  /// The metric has a loss for each step.
  void widen_loss() {
    const auto loss = stage_.named.find("loss");
    if (loss != stage_.named.end()) buffer(loss->second).type.shape = {steps_};
  }

  /// What step `i` writes in places of its own: its loss, and the numbers that are judged at the end.
  std::map<BufferId, BufferId> numbers_of(int i) {
    std::map<BufferId, BufferId> own;
    if (const auto loss = stage_.named.find("loss"); loss != stage_.named.end())
      own[loss->second] = element_of(stage_, loss->second, i);
    for (const std::string_view what : {kValidatedNorm, kValidatedFlag}) {
      const auto found = stage_.named.find(what);
      if (found == stage_.named.end()) continue;
      if (i > 0) renew(found->second, i, own);
      judged_[what].push_back(i > 0 ? own.at(found->second) : found->second);
    }
    return own;
  }

  /// Another storage, under all names that this one has.
  void renew(BufferId number, int step, std::map<BufferId, BufferId>& own) {
    const BufferId root = buffer(number).view ? BufferId(buffer(number).view->base) : number;
    const size_t count = stage_.role.buffers.size();
    for (size_t i = root.index(); i < count; ++i) {
      Buffer other = stage_.role.buffers[i];
      const bool is_root = i == root.index();
      if (!is_root && !(other.view && other.view->base == root.value)) continue;
      other.name += fmt::format("@{}", step);
      if (!is_root) other.view->base = own.at(root).value;
      own[BufferId(static_cast<int32_t>(i))] = add_buffer(stage_, std::move(other));
    }
    stage_.whole_step.push_back(own.at(root));
  }

  /// Not 0 where some step of the period was to be clipped or given up: the same on every rank.
  BufferId judge() {
    Buffer verdict;
    verdict.name = kRolledBack;
    verdict.type.dtype = DType::i32;
    verdict.type.shape = {1};
    verdict.kind = BufferClass::kMetric;
    verdict.persistent = true;
    const BufferId rolled_back = add_buffer(stage_, std::move(verdict));
    const auto norms = draft_.config.train.clip_norm > 0 ? judged_.find(kValidatedNorm) : judged_.end(),
               flags = judged_.find(kValidatedFlag);
    BufferId most, factor, clipped, known;
    if (norms != judged_.end()) {
      most = numbers_.number("clip.norm"), factor = numbers_.number("clip.factor"),
      clipped = numbers_.number("clipped", DType::i32);
      numbers_.append("clip.norm", {most}, Fill{draft_.config.train.clip_norm}, {}, {0});
    }
    for (int i = 0; i < steps_; ++i) {
      std::vector<BufferId> reasons;
      if (norms != judged_.end()) {
        numbers_.append("clip.factor", {norms->second[static_cast<size_t>(i)], most, factor}, named("clip_factor"), {0, 1}, {2});
        numbers_.append("clipped", {factor, clipped}, named("not_one"), {0}, {1});
        reasons.push_back(clipped);
      }
      if (flags != judged_.end()) reasons.push_back(flags->second[static_cast<size_t>(i)]);
      if (i > 0) reasons.push_back(known);
      known = i + 1 < steps_ ? numbers_.number(fmt::format("judged@{}", i), DType::i32) : rolled_back;
      std::vector<int> reads(reasons.size());
      for (size_t r = 0; r < reads.size(); ++r) reads[r] = static_cast<int>(r);
      reasons.push_back(known);
      numbers_.append(i == 0           ? "judge.first"
                      : i + 1 < steps_ ? "judge"
                                       : "judge.last",
                      reasons, named("any"), reads, {static_cast<int>(reads.size())});
    }
    return rolled_back;
  }

  /// The metric has a norm for each step.
  void report_norms() {
    const auto norms = judged_.find(kValidatedNorm);
    if (!draft_.config.train.grad_norm || norms == judged_.end()) return;
    Buffer report = buffer(norms->second.front());
    report.name = "grad_norm2";
    report.type.shape = {steps_};
    report.view.reset();
    report.persistent = true;
    const BufferId all = add_buffer(stage_, std::move(report));
    for (int i = 0; i < steps_; ++i)
      numbers_.append("grad_norm2.report", {norms->second[static_cast<size_t>(i)], element_of(stage_, all, i)}, Copy{}, {0}, {1});
  }

  Draft& draft_;
  StageDraft& stage_;
  const int steps_;
  StageNumbers numbers_;
  std::vector<std::pair<BufferId, BufferId>> kept_;  ///< state and its copy
  std::map<std::string_view, std::vector<BufferId>> judged_;
};

}  // namespace

StreamId meeting_stream(Draft& draft) {
  return draft.training && validates_later(draft.config) ? draft.stream(kPostValidationName) : StreamId(0);
}

void post_validation(Draft& draft) {
  for (StageDraft& stage : draft.stages) Period(draft, stage).run();
  draft.plan.period = static_cast<int>(draft.config.train.post_validation);
}

}  // namespace shardlab::strategies
