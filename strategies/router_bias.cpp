// Load balance without a loss: each expert has a bias, which is added to its scores where a token's experts are chosen, and nowhere else. After
// a step the bias goes up by a fixed rate where fewer tokens than the mean went to the expert, and down where more did.
//
// Backward of a layer counts the tokens that forward sent to each expert, so that a forward that runs again counts nothing. Counts are
// added up over the micro-batches of the step, and once a step over the ranks with other tokens. Counts are whole numbers: the order of their
// sum does not matter. Ranks of tp choose alike and count alike; with whole experts (whole_experts.cpp) each
// counts its own tokens, and loads are summed over tp too. Biases change after the last backward, so that a forward that runs again
// chooses as the first time. A step without an update (fp16, guard) leaves biases as they are; Megatron-LM moves them in such steps too
// (core/distributed/finalize_model_grads.py, which runs before the optimizer looks for overflows).
//
// Shapes   bias and load f32[e] a layer with experts
// Adds     per step and stage an all-reduce of e f32 a layer over dp and cp, and under DualPipe another over the two stages of a part
// Memory   2 e f32 a layer with experts, and one f32
// Refuses  workers with parameters of their own, parameter servers (`check`)
// Paper    Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts" (2024); DeepSeek-AI, "DeepSeek-V3 Technical
//          Report" (2024), section 2.1.2
#include "strategies/router_bias.h"

#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plan/named_kernels.h"
#include "strategies/draft.h"
#include "strategies/mirrored_stages.h"
#include "strategies/skipped_update.h"

namespace shardlab::strategies {
namespace {

constexpr std::string_view kName = "router-bias";

class RouterBias {
 public:
  RouterBias(Draft& draft, StageDraft& stage)
      : draft_(draft), stage_(stage), numbers_(draft, stage, kName), experts_(draft.config.model.experts.count) {
    for (const int unit : stage.units)
      if (draft.is_mixture(draft.units[static_cast<size_t>(unit)].kind))
        layers_.push_back(draft.units[static_cast<size_t>(unit)].layer);
  }

  void run() {
    if (layers_.empty()) return;
    for (const int layer : layers_) {
      Buffer bias;
      bias.name = "router_bias.layers." + std::to_string(layer);
      bias.type.shape = {experts_};
      bias.kind = BufferClass::kOther;
      bias.persistent = true;
      biases_.push_back(add_buffer(stage_, std::move(bias)));
      stage_.named[unit_slot(layer, kRouterBiasSlot)] = biases_.back();
    }
    if (draft_.training) follow_load();
  }

 private:
  static std::string unit_slot(int layer, std::string_view slot) {
    return "layers." + std::to_string(layer) + "." + std::string(slot);
  }

  void follow_load() {
    const DraftSegment& backward = draft_.of(draft_.mixture_kinds().front()).backward;
    const Type summand = backward.slot(backward.find(kRouterLoadSlot)).type;
    AxisSet axes;
    Type sum = summand;
    for (size_t axis = 0; axis < draft_.plan.mesh.axes.size(); ++axis)
      if (summand.place[axis].is_partial() && static_cast<int>(axis) != draft_.plan.mesh.axis("pp")) {
        axes = axes | AxisSet::of(static_cast<int>(axis));
        sum.place[axis] = Placement::replicate();
      }
    Type all = summand;
    all.shape = {experts_ * static_cast<int64_t>(layers_.size())};
    const BufferId loads = add("router_load", all, std::nullopt);
    stage_.whole_step.push_back(loads);
    const BufferId rate = numbers_.number("router_bias_rate");
    std::vector<Event> begin{
        numbers_.call("router_load.begin", {loads}, Fill{0}, {}, {0}),
        numbers_.call("router_bias.rate", {rate}, Fill{draft_.config.model.experts.bias_update_rate}, {}, {0})};
    stage_.events.insert(stage_.events.begin(), std::make_move_iterator(begin.begin()), std::make_move_iterator(begin.end()));
    BufferId whole = loads;
    if (!axes.empty()) {
      all.place = sum.place;
      whole = add("router_load.all", all, View{loads.value, 0, {}});
      numbers_.append("router_load.all", {loads, whole},
                      Collective{CollectiveKind::kAllReduce, ReduceOp::kSum, draft_.comm("router.load", axes), draft_.algorithm()},
                      {0}, {1});
    }
    const bool mirrored = has_mirrored_stages(draft_);  // each of the two stages has counted the tokens of its own micro-batches
    if (mirrored) {
      whole = sum_loads_over_mirrors(draft_, stage_, whole);
      sum.place = stage_.role.buffers[whole.index()].type.place;
    }
    // Delayed updates go by the gradients of the step before; the first has none, and loads of its own.
    const BufferId stands = draft_.config.layout.offload.delayed_update ? BufferId() : stage_.go;
    for (size_t i = 0; i < layers_.size(); ++i) {
      const View at{loads.value, static_cast<int64_t>(i) * experts_, {}};
      const std::string slot = unit_slot(layers_[i], kRouterLoadSlot);
      const BufferId part = add(slot, summand, at);
      stage_.named[slot] = part;
      const BufferId load = whole == loads ? part : add(slot + ".all", sum, at);
      numbers_.append("router_bias.update", {load, biases_[i], rate}, named("update_router_bias"), {0, 1, 2}, {1}, stands);
    }
  }

  BufferId add(std::string name, const Type& type, std::optional<View> view) {
    Buffer b;
    b.name = std::move(name);
    b.type = type;
    b.kind = BufferClass::kOther;
    b.view = std::move(view);
    return add_buffer(stage_, std::move(b));
  }

  Draft& draft_;
  StageDraft& stage_;
  StageNumbers numbers_;
  int64_t experts_;
  std::vector<int> layers_;
  std::vector<BufferId> biases_;
};

}  // namespace

void balance_by_bias(Draft& draft) {
  for (StageDraft& stage : draft.stages) RouterBias(draft, stage).run();
}

}  // namespace shardlab::strategies
