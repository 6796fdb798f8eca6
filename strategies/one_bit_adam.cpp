// 1-bit Adam: once the variance of Adam has settled it is frozen, and from then on what ranks exchange is momentum, one
// bit an element.
//
// A run has two phases, a plan each (`warm_up_steps`). For `compression.warmup` steps gradients are all-reduced in fp32 and Adam
// updates both moments. Then every rank folds its own gradient into the momentum that all of them know,
//
//   m_r = beta1 m / N + (1 - beta1) g_r             (the sum over the ranks is the momentum of the whole gradient)
//
// and these are summed as quantised_gradients.cpp sums gradients, with errors kept on both legs: each rank sends the signs of m_r +
// its error, with their mean size as scale of each slice; the owner of a slice adds up what it received, and sends signs and a
// scale of that + its own error to all. What comes is the next momentum, the same on every rank, and
//
//   direction = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^K)) + epsilon),     value -= learning_rate (direction + decay value)
//
// with v as the K = warmup steps left it. The paper's Adam corrects no bias; here both moments go on as AdamW's of the first phase
// had them, so that the step does not jump where v is frozen. An element of which v knows nothing (sqrt(v / ..) <= epsilon: a row
// of the table that no token asked for, a padded tail, a gradient that is 0 but for rounding) would be moved by its neighbours'
// mean size over epsilon: its momentum is 0 and it stays. Published code asks users for a mask of such elements.
//
// Both phases keep the same state under the same names: parameters, moments, errors (0 until the second begins), so that a run goes
// from one to the other, and a checkpoint of either is resumed, by name.
//
// Shapes   bucket[n], n a multiple of 8 N; signs u8[n/8], scales [N]; slices [n/N]; moments as the parameters
// Adds     warm-up: all-reduce, 2 Psi (N-1)/N elements of 4 bytes; then all-to-all and all-gather of signs and scales:
//          2 (N-1)/N (1/8 + 4 N/n) bytes an element, 1/32 of that but for the scales
// Memory   errors 4 (1 + 1/N) bytes an element, in both phases; then two buffers of the largest bucket's signs, 8 bytes a scale
// Refuses  dp = 1; SGD; warmup below 1; ZeRO; tp; an optimizer on the host; clipping and norms of the gradient, which no rank has;
//          tables tied across stages or, in canonical mode, at all, whose gradients are added after their reduction; fp16 and
//          guards; timed steps before the second phase (`run`)
// Paper    Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed" (2021), algorithm
//          1; Seide et al., "1-Bit Stochastic Gradient Descent" (2014): error feedback
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "strategies/compression.h"
#include "strategies/data_parallel.h"
#include "strategies/skipped_update.h"
#include "strategies/state.h"
#include "strategies/warm_up.h"

namespace shardlab::strategies {
namespace {

constexpr std::string_view kOneBitAdamName = "one-bit-adam";
constexpr WireCode kSigns{DType::u8, 1};

class OneBitAdam {
 public:
  OneBitAdam(Draft& draft, StageDraft& stage) : draft_(draft), stage_(stage), numbers_(draft, stage, kOneBitAdamName) {}

  /// The first phase: plain Adam, with the state of the second phase.
  void warm_up() {
    fill_coded_buckets(draft_, stage_, kSigns);
    declare_moments();
    for (Bucket& bucket : stage_.buckets) {
      declare_reduced(draft_, stage_, bucket);
      add_leg_errors(draft_, stage_, bucket);
    }
    reduce_when_complete(draft_, stage_, CollectiveKind::kAllReduce, kOneBitAdamName);
    for (auto& unit : stage_.state)  // updates read them
      for (ParameterState& state : unit)
        if (const auto found = moments_.find(state.value); found != moments_.end() && !state.merged)
          state.optimizer_state = {found->second.m, found->second.v};
  }

  void compress() {
    declare_moments();
    const Train& t = draft_.config.train;
    const double left = std::pow(double{t.beta2}, static_cast<double>(draft_.config.layout.compression.warmup));
    beta1_ = number("beta1", t.beta1);
    correction_ = number("correction", static_cast<float>(1.0 - left));
    epsilon_ = number("epsilon", t.epsilon);
    reduce_in_codes(draft_, stage_, kSigns,
                    {.strategy = kOneBitAdamName,
                     .name = [this](const Bucket& bucket) { return name_of_segment(bucket); },
                     .before = [this](Compressing& ops, const Bucket& bucket, SlotId gradient) { fold(ops, bucket, gradient); },
                     .after = [this](Compressing& ops, const Bucket& bucket, SlotId sum) { take_direction(ops, bucket, sum); }});
  }

 private:
  struct Moments {
    BufferId m, v;
  };

  /// fp32, placed as the value that computes, one each of every value.
  void declare_moments() {
    for (const int unit : stage_.units)
      for (int p = 0; p < static_cast<int>(draft_.of_unit(unit).parameters.size()); ++p) {
        const ParameterState& state = stage_.at(unit, p);
        if (state.merged || moments_.contains(state.value)) continue;
        Buffer moment = stage_.role.buffers[state.value.index()];
        const std::string name = moment.name;
        moment.type.dtype = DType::f32;
        moment.kind = BufferClass::kMoment;
        moment.name = name + ".m";
        const BufferId m = add_buffer(stage_, moment);
        moment.name = name + ".v";
        moments_[state.value] = {m, add_buffer(stage_, moment)};
      }
  }

  /// A constant, there before anything reads it.
  BufferId number(const std::string& name, float value) {
    const BufferId id = numbers_.number("onebit." + name);
    stage_.events.insert(stage_.events.begin(), numbers_.call("onebit." + name, {id}, Fill{value}, {}, {0}));
    return id;
  }

  const Moments& moments_of(const Bucket::Member& member) const {
    return moments_.at(stage_.at(member.unit, member.parameter).value);
  }

  /// Buckets of equal members share one.
  std::string name_of_segment(const Bucket& bucket) {
    std::string members = signature(draft_, stage_, bucket);
    for (const Bucket::Member& member : bucket.members) {
      const Shape& shape = stage_.role.buffers[moments_of(member).m.index()].type.shape;
      members += shape.rank == 1 ? fmt::format(" {}", shape[0]) : fmt::format(" {}x{}", shape[0], shape[1]);
    }
    return "onebit." + members;
  }

  void fold(Compressing& ops, const Bucket& bucket, SlotId gradient) const {
    std::vector<SlotId> reads{gradient, ops.bound("beta1", beta1_)};
    for (size_t i = 0; i < bucket.members.size(); ++i)
      reads.push_back(ops.bound(fmt::format("m{}", i), moments_of(bucket.members[i]).m));
    ops.kernel("fold_momentum", std::move(reads), {gradient}, "fold");
  }

  /// `fold` has bound beta1 and the moments already: slots of one binding are one buffer.
  void take_direction(Compressing& ops, const Bucket& bucket, SlotId sum) const {
    std::vector<SlotId> reads{sum, ops.find("beta1"), ops.bound("correction", correction_), ops.bound("epsilon", epsilon_)};
    std::vector<SlotId> writes{sum};
    for (size_t i = 0; i < bucket.members.size(); ++i) {
      reads.push_back(ops.bound(fmt::format("v{}", i), moments_of(bucket.members[i]).v));
      writes.push_back(ops.find(fmt::format("m{}", i)));
    }
    ops.kernel("frozen_adam", std::move(reads), std::move(writes), "direction");
  }

  Draft& draft_;
  StageDraft& stage_;
  StageNumbers numbers_;
  std::map<BufferId, Moments> moments_;  ///< by value
  BufferId beta1_, correction_, epsilon_;
};

}  // namespace

bool steps_by_direction(const Draft& draft) {
  const Compression& compression = draft.config.layout.compression;
  return draft.training && compression.kind == CompressionKind::kOneBitAdam && compression.warmup != kNeverFrozen;
}

void one_bit_adam(Draft& draft) {
  for (StageDraft& stage : draft.stages) {
    OneBitAdam technique(draft, stage);
    if (steps_by_direction(draft))
      technique.compress();
    else
      technique.warm_up();
  }
}

}  // namespace shardlab::strategies
