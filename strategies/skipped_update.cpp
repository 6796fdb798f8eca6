// Updates that may be left out: where some rank found a reason to trust no gradient of the step, no rank updates anything.
//
// What finds a reason (the loss scale an overflow, the guard a spike, the bound of experts too many rows) leaves a flag, the same on every rank, in
// `StageDraft::flags`. They become one predicate of every update, and of the count of updates made, by which bias correction and
// the learning rate's schedule go. All collectives run in either case: a skipped step costs what another does, less the updates.
//
// Shapes   flags and count [1]
// Adds     nothing
// Memory   a few bytes
// Refuses  nothing
// Paper    Micikevicius et al., "Mixed Precision Training" (2018), section 3.2
#include "strategies/skipped_update.h"

#include "plan/named_kernels.h"
#include "plan/run_state.h"
#include "plan/techniques.h"
#include "strategies/expert_bound.h"
#include "strategies/guard.h"
#include "strategies/optimizer.h"
#include "strategies/shards.h"

namespace shardlab::strategies {

BufferId StageNumbers::number(std::string name, DType dtype, bool persistent) const {
  Buffer b;
  b.name = std::move(name);
  b.type.dtype = dtype;
  b.type.shape = {1};
  b.kind = BufferClass::kOther;
  b.persistent = persistent;
  const BufferId id = add_buffer(stage_, std::move(b));
  if (!persistent) stage_.whole_step.push_back(id);
  return id;
}

Event StageNumbers::call(std::string name, std::vector<BufferId> buffers, Work work, const std::vector<int>& reads,
                         const std::vector<int>& writes, BufferId when) const {
  if (when) buffers.push_back(when);
  const SegmentId segment = draft_.cached(name + "." + std::to_string(stage_.role.stage), [&] {
    Op op;
    op.work = std::move(work);
    op.label = name;
    op.strategy = strategy_;
    if (when) op.when = SlotId(static_cast<int32_t>(buffers.size()) - 1);
    return one_op_segment(name, stage_, buffers, std::move(op), reads, writes);
  });
  return call_event(bind(segment, std::move(buffers)));
}

BufferId StageNumbers::found_inf(std::string where) const {
  declare_updates(draft_, stage_);
  std::vector<BufferId> buffers;
  for (const Update& u : stage_.updates) buffers.push_back(u.gradient);
  std::vector<int> reads(buffers.size());
  for (size_t i = 0; i < reads.size(); ++i) reads[i] = static_cast<int>(i);
  BufferId bad = number("found_inf", DType::i32);
  // Who holds a slice, experts of its own, or other layers, speaks for that alone.
  const Mesh& mesh = draft_.plan.mesh;
  const bool slices = updates_slices(draft_.config.layout);
  std::vector<std::pair<std::string_view, AxisSet>> apart;
  for (const auto& [name, axes] : {std::pair<std::string_view, AxisSet>{"tp", axes_of(mesh, "tp")},
                                   {slices ? "dp" : "ep", slices ? data_axes(mesh) : expert_axes(draft_)},
                                   {"pp", axes_of(mesh, "pp")}})
    if (mesh.size(axes) > 1) apart.emplace_back(name, axes);
  for (const auto& [name, axes] : apart) {
    Type& type = stage_.role.buffers[bad.index()].type;
    type = placed(type, axes, Placement::partial());
  }
  std::vector<int> writes{static_cast<int>(reads.size())};
  // Gradients that are in host memory are searched there: the host keeps which, and tells the device whether.
  const bool away = stage_.role.buffers[buffers.front().index()].space == Space::kHost;
  buffers.push_back(bad);
  if (!where.empty()) {
    Buffer number = stage_.role.buffers[bad.index()];
    number.name = std::move(where);
    for (const auto& [name, axes] : apart) number.type = placed(number.type, axes, Placement::local());
    number.kind = BufferClass::kMetric;
    number.persistent = true;
    if (away) number.space = Space::kHost;
    writes.push_back(static_cast<int>(buffers.size()));
    buffers.push_back(add_buffer(stage_, std::move(number)));
  }
  append("found_inf", buffers, named("found_inf"), reads, writes);
  for (const auto& [name, axes] : apart) bad = all_reduce_scalar(draft_, stage_, bad, name, axes, ReduceOp::kMax);
  return bad;
}

void skip_updates(Draft& draft) {
  if (bounds_experts(draft.config)) agree_on_overflow(draft);
  for (StageDraft& stage : draft.stages) {
    const StageNumbers numbers(draft, stage, "skipped-update");
    if (validates_later(draft.config)) {  // every update is made, and perhaps taken back with its count
      const BufferId made = numbers.number(std::string(kAppliedSteps), DType::i32, true);
      numbers.append("count", {made}, named("count"), {0}, {0});
      continue;
    }
    BufferId bad = stage.flags.front();
    if (stage.flags.size() > 1) {
      std::vector<BufferId> buffers = stage.flags;
      std::vector<int> reads(buffers.size());
      for (size_t i = 0; i < reads.size(); ++i) reads[i] = static_cast<int>(i);
      bad = numbers.number("skip", DType::i32);
      buffers.push_back(bad);
      numbers.append("skip", buffers, named("any"), reads, {static_cast<int>(reads.size())});
    }
    stage.go = numbers.number("go", DType::i32);
    numbers.append("go", {bad, stage.go}, named("not"), {0}, {1});
    if (!may_skip(draft.config)) continue;  // a step that runs again is updated then: steps are counted by their number
    const BufferId applied = numbers.number(std::string(kAppliedSteps), DType::i32, true);
    numbers.append("count", {applied}, named("count"), {0}, {0}, stage.go);
    take_into_means(draft, stage);
  }
}

}  // namespace shardlab::strategies
