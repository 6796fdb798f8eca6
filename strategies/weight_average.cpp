// A running average of the weights (EMA), kept beside them. Training does not read it: it is what one evaluates or hands on.
//
// After every update, with d the decay:
//
//   average = average - (1 - d) * (average - value)
//
// An average begins at zero, as Adam's moments do. `steps.averaged`, the same average of a constant 1, says how much of it the
// steps have filled, 1 - d^t: whoever reads an average divides by that. A step whose update is left out leaves both. The average of
// a parameter lies where the parameter is updated: under ZeRO a rank averages its slices; of 16-bit parameters the copy in fp32 is
// averaged. Checkpoints carry averages as the state "ema" of each parameter, under any layout.
//
// Shapes   as what is updated: parameters, or slices of buckets
// Adds     nothing
// Memory   4 bytes a parameter, cut as moments are; while a parameter is averaged as much again of that one; a few numbers
// Refuses  an optimizer on the host, parameter servers and workers that train apart (`check`)
// Paper    Polyak & Juditsky, "Acceleration of Stochastic Approximation by Averaging" (1992); Kingma & Ba, "Adam" (2015), section 7.2
//          (exponential decay, and its correction)
#include "strategies/weight_average.h"

#include <string>
#include <vector>

#include "plan/named_kernels.h"
#include "plan/run_state.h"
#include "plan/text.h"
#include "strategies/draft.h"
#include "strategies/skipped_update.h"

namespace shardlab::strategies {
namespace {

constexpr std::string_view kAverageName = "weight-average";

class WeightAverage {
 public:
  WeightAverage(Draft& draft, StageDraft& stage) : draft_(draft), stage_(stage), numbers_(draft, stage, kAverageName) {}

  void run() {
    if (stage_.updates.empty()) return;
    const BufferId filled = numbers_.number(std::string(kAveragedSteps), DType::f32, true), one = numbers_.number("average.one");
    share_ = numbers_.number("average.share");
    rate_ = numbers_.number("average.rate");
    numbers_.append("average.one", {one}, Fill{1}, {}, {0});
    numbers_.append("average.share", {share_}, Fill{1}, {}, {0});
    numbers_.append("average.rate", {rate_}, Fill{1 - draft_.config.train.ema_decay}, {}, {0});
    follow(one, filled, " number");
    for (const Update& update : stage_.updates) {
      const Buffer value = stage_.role.buffers[update.value.index()];
      Buffer average = value;
      average.name += ".ema";
      average.kind = BufferClass::kMoment;
      average.persistent = true;
      average.view.reset();
      // Values of one type share their segments.
      follow(update.value, add_buffer(stage_, std::move(average)),
             " " + std::string(name_of(value.kind)) + (value.view ? " view " : " ") + print(value.type, draft_.plan.mesh));
    }
  }

 private:
  /// Moves an average by how far it is from a value; `of` tells the segments of one type from another's.
  void follow(BufferId value, BufferId average, const std::string& of) {
    Buffer b = stage_.role.buffers[average.index()];
    b.name += ".distance";
    b.kind = BufferClass::kOther;
    b.persistent = false;
    b.parameter = b.packed_as = -1;
    const BufferId distance = add_buffer(stage_, std::move(b));
    stage_.events.push_back(alloc_event(distance));
    numbers_.append("average.distance" + of, {average, value, distance}, named("subtract"), {0, 1}, {2});
    numbers_.append("average.move" + of, {distance, average, share_, rate_}, named("outer_step"), {0, 1, 2, 3}, {1}, stage_.go);
    stage_.events.push_back(free_event(distance));
  }

  Draft& draft_;
  StageDraft& stage_;
  StageNumbers numbers_;
  BufferId share_, rate_;
};

}  // namespace

void average_weights(Draft& draft) {
  if (!draft.training) return;
  for (StageDraft& stage : draft.stages) WeightAverage(draft, stage).run();
}

}  // namespace shardlab::strategies
