// A bound on rows of experts, without drops: a rank has room with its experts for F even shares of a micro-batch's rows, where the worst case
// is n. A step in which more rows come changes nothing that is kept, and the run makes it again, one sequence at a time (`second_run_of`),
// with room for the worst case of one sequence. So the room is that of max(F b, n) sequences in place of n b.
//
// Counts travel before rows, so that a rank knows when its exchange begins whether all that come fit. Its peers have rows to give and wait for
// some, so it takes and gives each message in its true size: one that would reach beyond the room lies at its end, on top of others
// (runtime/packed_rows.h). Behind each exchange of forward `fit_rows` cuts the counts off where the room ends, by which experts go
// through the rows, and notes in a flag of the step whether some were cut off. At the end of backward the flag becomes the greatest over all
// ranks and stages: all updates are left out, or none. Rows of such a step are wrong and finite, for each place in the room was written.
//
// A forward that runs again finds the same: the flag is a maximum. The validation step keeps the worst case, of one layer at a time.
//
// Shapes   rows with the experts [1, F n ceil(b s/c k / n), width]; counts as they are, and once more cut off; a flag i32[1] a stage
// Adds     two all-reduces (maximum) of 4 bytes a step, over the ranks with other tokens and over the stages. No exchange changes
// Memory   rows with the experts times F/n; counts of a layer and micro-batch twice
// Refuses  F below 1, or n and above; one sequence a micro-batch, whose second run would be the first; a capacity, which bounds the rows;
//          post-validation; what the second run's number of micro-batches is refused with (`check`)
// Paper    none
#include "strategies/expert_bound.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plan/named_kernels.h"
#include "plan/run_state.h"
#include "strategies/draft.h"
#include "strategies/optimizer.h"
#include "strategies/skipped_update.h"

namespace shardlab::strategies {
namespace {

constexpr std::string_view kExpertBoundName = "expert-bound";
/// A slot of a layer with experts, i32[1]: not 0 where more rows came in the step than the rank has room for.
constexpr std::string_view kOverflowSlot = "experts.overflow";
constexpr std::string_view kCounts = "rows.counts.there", kFitted = "rows.counts.fit";

/// The axes along which ranks have other rows with their experts.
AxisSet rows_axes(const Draft& draft) { return data_axes(draft.plan.mesh) | routed_axes(draft); }

/// Each rank speaks for the rows of its experts, and each stage for its layers.
Type flag_type(const Draft& draft) {
  const Mesh& mesh = draft.plan.mesh;
  Type type;
  type.dtype = DType::i32;
  type.shape = {1};
  return placed(placed(std::move(type), rows_axes(draft), Placement::partial()), axes_of(mesh, "pp"), Placement::partial());
}

class ExpertBound {
 public:
  ExpertBound(Draft& draft, UnitTemplate& layer) : draft_(draft), layer_(layer) {
    // Rows that the tokens of one rank make, in whole groups: n of them are the worst case.
    const int64_t share = layer.forward.slot(layer.forward.find("rows.in")).type.shape.elements() /
                          layer.forward.slot(layer.forward.find("rows.in")).type.shape.last();
    room_ = static_cast<int64_t>(std::ceil(static_cast<double>(draft.config.layout.expert_bound) * static_cast<double>(share)));
  }

  void run() {
    for (DraftSegment* segment : {&layer_.forward, &layer_.backward}) {
      lower_room(*segment);
      go_by_fitted(*segment);
    }
    judge(layer_.forward);
  }

 private:
  /// Rows with the experts, which are one group: counts of them are as many as before.
  void lower_room(DraftSegment& segment) const {
    for (Slot& slot : segment.segment.slots)
      if (is_rows_of_experts(slot) && slot.type.shape[0] == 1 && slot.type.dtype != DType::i32) slot.type.shape[1] = room_;
  }

  void go_by_fitted(DraftSegment& segment) const {
    const SlotId all = segment.find(kCounts);
    const Type type = segment.slot(all).type;
    const SlotId fitted = segment.add(std::string(kFitted), type, Use::kSaved, BufferClass::kActivation);
    for (Step& step : segment.segment.steps) {
      Op& op = std::get<Op>(step);
      if (counts_read(op)) std::ranges::replace(op.reads, all, fitted);
    }
  }

  void judge(DraftSegment& forward) const {
    const SlotId overflow = forward.add(std::string(kOverflowSlot), flag_type(draft_), Use::kNamed, BufferClass::kOther),
                 rows = forward.find("rows.in.there"), fitted = forward.find(kFitted);
    auto& steps = forward.segment.steps;
    const auto moves = std::ranges::find_if(steps, [](const Step& s) { return std::get<Op>(s).label == "moe.go"; });
    SHARDLAB_CHECK(moves != steps.end(), "{} has no moe.go", forward.segment.name);
    steps.insert(std::next(moves), make_op(named("fit_rows"), {rows, forward.find(kCounts), overflow}, {fitted, overflow},
                                           "moe.fit", kExpertBoundName));
  }

  Draft& draft_;
  UnitTemplate& layer_;
  int64_t room_ = 0;
};

}  // namespace

void bound_experts(Draft& draft) {
  for (const UnitKind kind : draft.mixture_kinds()) ExpertBound(draft, draft.of(kind)).run();
}

void agree_on_overflow(Draft& draft) {
  for (StageDraft& stage : draft.stages) {
    const StageNumbers numbers(draft, stage, kExpertBoundName);
    BufferId flag = numbers.number(std::string(kOverflowSlot), DType::i32);
    stage.role.buffers[flag.index()].type = flag_type(draft);
    stage.named[std::string(kOverflowSlot)] = flag;
    stage.events.insert(stage.events.begin(), numbers.call("experts.overflow.begin", {flag}, Fill{0}, {}, {0}));
    const bool over_tp = draft.config.layout.folds_experts();  // a communicator of other axes than the metrics' over dp
    flag = all_reduce_scalar(draft, stage, flag, over_tp ? "rows" : "dp", rows_axes(draft), ReduceOp::kMax);
    if (draft.config.layout.pp > 1) flag = all_reduce_scalar(draft, stage, flag, "pp", ReduceOp::kMax);
    const BufferId word = numbers.number(std::string(kOverflowed), DType::i32, true);
    stage.role.buffers[word.index()].kind = BufferClass::kMetric;
    numbers.append(std::string(kOverflowed), {flag, word}, named("any"), {0}, {1});
    stage.flags.push_back(word);
  }
}

}  // namespace shardlab::strategies
