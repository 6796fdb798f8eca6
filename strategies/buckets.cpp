#include "strategies/buckets.h"

#include <algorithm>
#include <compare>
#include <functional>
#include <iterator>

#include "plan/precision.h"
#include "strategies/accumulation.h"
#include "strategies/state.h"

namespace shardlab::strategies {
namespace {

struct Kind {
  bool decay = true, sliced = false, tied = false, alone = false, shared = false;
  friend auto operator<=>(const Kind&, const Kind&) = default;
};

class Bucketing {
 public:
  Bucketing(Draft& draft, StageDraft& stage, const BucketRule& rule) : draft_(draft), stage_(stage), rule_(rule) {}

  /// Backward finishes the units of a part from the last to the first, and a unit's parameters together.
  void fill() {
    std::map<Kind, Bucket> open;
    const auto close_all = [&] {
      for (auto& [kind, bucket] : open) stage_.buckets.push_back(std::move(bucket));
      open.clear();
    };
    for (auto last = stage_.units.rbegin(); last != stage_.units.rend(); ++last) {
      const int unit = *last;
      for (int p = static_cast<int>(draft_.of_unit(unit).parameters.size()) - 1; p >= 0; --p) {
        if (stage_.at(unit, p).merged) continue;
        const Kind kind = kind_of_parameter(unit, p);
        Bucket& bucket = open[kind];
        bucket.decay = kind.decay;
        bucket.tied = kind.tied;
        bucket.members.push_back({unit, p, bucket.elements});
        bucket.elements += value(unit, p).type.shape.elements();
        bucket.last_unit = unit;
        if (kind.tied || kind.alone ||
            (rule_.layers == 0 && bytes_of(element_types(draft_.config).gradient, bucket.elements) >= rule_.bytes)) {
          stage_.buckets.push_back(std::move(bucket));
          open.erase(kind);
        }
      }
      if ((rule_.layers > 0 && ends_unit(unit)) || stage_.begins_part(unit)) close_all();
    }
    close_all();
    std::ranges::stable_sort(stage_.buckets, std::greater(), &Bucket::last_unit);
    for (size_t i = 0; i < stage_.buckets.size(); ++i) declare(stage_.buckets[i], "bucket" + std::to_string(i));
    // Once for all buckets: a deep model has parameters by the hundred thousand.
    std::erase_if(stage_.whole_step, [&](BufferId id) { return id.index() < is_member_.size() && is_member_[id.index()]; });
    stage_.events.insert(stage_.events.begin(), std::make_move_iterator(zeros_.rbegin()), std::make_move_iterator(zeros_.rend()));
  }

 private:
  const Buffer& value(int unit, int p) const { return stage_.role.buffers[stage_.at(unit, p).value.index()]; }

  /// Layers are taken together from the first of the model on.
  bool ends_unit(int unit) const {
    const Unit& u = draft_.units[static_cast<size_t>(unit)];
    return !is_layer(u.kind) || u.layer % rule_.layers == 0;
  }

  Kind kind_of_parameter(int unit, int p) const {
    const Unit& u = draft_.units[static_cast<size_t>(unit)];
    const Parameter& parameter = draft_.plan.parameters[u.parameters[static_cast<size_t>(p)].index()];
    const bool tied = draft_.config.model.tied_embeddings && parameter.name == "embed.tokens";
    const int tp = draft_.plan.mesh.axis("tp");
    return {parameter.decay, parameter.type.place[static_cast<size_t>(tp)].is_shard(), tied, rule_.alone && rule_.alone(unit, p),
            is_of_shared_experts(draft_, parameter.type)};
  }

  /// Makes the flat buffer and turns the members' gradients into views of it.
  void declare(Bucket& bucket, std::string name) {
    bucket.name = std::move(name);
    const int64_t filled = bucket.elements;
    const int64_t multiple = multiple_for(filled);
    bucket.elements = (filled + multiple - 1) / multiple * multiple;
    if (!draft_.training) return;
    const Bucket::Member& first = bucket.members.front();
    Buffer flat;
    flat.name = bucket.name + ".grad";
    flat.type = gradient_type(draft_, first.unit, first.parameter);
    flat.type.shape = {bucket.elements};
    flat.type = placed(flat.type, partial_axes(flat.type, early_axes(draft_)), Placement::replicate());
    flat.type = nobodys_shard(draft_, std::move(flat.type));
    flat.kind = BufferClass::kGradient;
    bucket.gradient = add_buffer(stage_, std::move(flat));
    for (const Bucket::Member& m : bucket.members) {
      const ParameterState& state = stage_.at(m.unit, m.parameter);
      for (const BufferId id : {state.gradient, state.reduced})  // which may be the same storage under the type of a sum
        stage_.role.buffers[id.index()].view = View{bucket.gradient.value, m.offset, {}};
      if (is_member_.size() <= state.gradient.index()) is_member_.resize(stage_.role.buffers.size());
      is_member_[state.gradient.index()] = true;
    }
    if (bucket.elements > filled) declare_padding(bucket, filled);
    if (!rule_.whole_step) return;
    stage_.whole_step.push_back(bucket.gradient);
    if (auto zeros = padding_event(draft_, stage_, bucket)) zeros_.push_back(std::move(*zeros));
  }

  /// With blocks: as many to each slice as hold it, and two elements more or less in each.
  int64_t multiple_for(int64_t filled) const {
    if (rule_.block == 0) return rule_.multiple;
    const int64_t slice = (filled + rule_.multiple - 1) / rule_.multiple;
    return rule_.multiple * ((slice + rule_.block - 1) / rule_.block) * 2;
  }

  void declare_padding(Bucket& bucket, int64_t filled) {
    Buffer tail = stage_.role.buffers[bucket.gradient.index()];
    tail.name = bucket.name + ".padding";
    tail.type.shape = {bucket.elements - filled};
    tail.view = View{bucket.gradient.value, filled, {}};
    bucket.padding = add_buffer(stage_, std::move(tail));
  }

  Draft& draft_;
  StageDraft& stage_;
  BucketRule rule_;
  std::vector<bool> is_member_;  ///< by buffer: a gradient that is a part of a bucket
  std::vector<Event> zeros_;     ///< of the tails, by bucket
};

}  // namespace

bool is_of_shared_experts(const Draft& draft, const Type& type) {
  for (int axis = 0; axis < kMaxAxes; ++axis)
    if (expert_axes(draft).contains(axis) && type.place[static_cast<size_t>(axis)].is_shard()) return true;
  return false;
}

void fill_buckets(Draft& draft, StageDraft& stage, const BucketRule& rule) { Bucketing(draft, stage, rule).fill(); }

std::optional<Event> padding_event(Draft& draft, const StageDraft& stage, const Bucket& bucket) {
  if (!bucket.padding) return std::nullopt;
  const int64_t elements = stage.role.buffers[bucket.padding.index()].type.shape[0];
  const std::string name = "padding." + std::to_string(elements) + "." + signature(draft, stage, bucket);
  const SegmentId segment = draft.cached(name, [&] {
    Op op;
    op.work = Fill{0};
    op.label = "padding";
    op.strategy = "buckets";
    return one_op_segment(name, stage, {bucket.padding}, std::move(op), {}, {0});
  });
  return call_event(bind(segment, {bucket.padding}));
}

BackwardTimes::BackwardTimes(const Draft& draft, const StageDraft& stage)
    : stage_(stage),
      micro_batches_(static_cast<size_t>(draft.micro_batches())),
      times_(stage.units.size() * micro_batches_),
      next_(stage.events.size()) {
  std::optional<size_t> following;
  for (size_t i = stage.events.size(); i-- > 0;) {
    const Event& e = stage.events[i];
    next_[i] = following.value_or(i);
    if (e.computes()) following = i;
    const bool touches = e.makes_gradients() || e.kind == Event::Kind::kCall;
    if (!touches || !stage.holds(e.unit) || e.micro_batch < 0) continue;
    Times& t = times_[stage.index_of(e.unit) * micro_batches_ + static_cast<size_t>(e.micro_batch)];
    if (t.last == 0) t.last = i;
    if (!e.makes_gradients()) continue;
    t.first = i;
    t.any = true;
  }
}

std::vector<int> BackwardTimes::order(const Bucket& bucket) const {
  std::vector<int> all;
  for (int j = 0; j < static_cast<int>(micro_batches_); ++j)
    if (at(bucket.last_unit, j).any) all.push_back(j);
  std::ranges::sort(all, {}, [&](int j) { return at(bucket.last_unit, j).first; });
  return all;
}

size_t BackwardTimes::complete(const Bucket& bucket) const {
  size_t index = 0;
  for (const int j : order(bucket)) index = std::max(index, last(bucket, j));
  return index;
}

size_t BackwardTimes::first(const Bucket& bucket, int micro_batch) const {
  size_t index = SIZE_MAX;
  for (const Bucket::Member& m : bucket.members) index = std::min(index, at(m.unit, micro_batch).first);
  return index;
}

Type nobodys_shard(const Draft& draft, Type type) {
  const AxisSet cutting = tensor_axes(draft.plan.mesh) | expert_axes(draft);
  for (int axis = 0; axis < kMaxAxes; ++axis)
    if (Placement& place = type.place[static_cast<size_t>(axis)]; cutting.contains(axis) && place.is_shard())
      place = Placement::local();
  return type;
}

AxisSet reduction_axes(const Draft& draft, const StageDraft& stage, const Bucket& bucket) {
  const Type& type = stage.role.buffers[bucket.gradient.index()].type;
  AxisSet axes;
  for (int axis = 0; axis < static_cast<int>(draft.plan.mesh.axes.size()); ++axis)
    if (data_axes(draft.plan.mesh).contains(axis) &&
        (draft.plan.mesh.axes[static_cast<size_t>(axis)].size == 1 || type.place[static_cast<size_t>(axis)].is_partial()))
      axes = axes | AxisSet::of(axis);
  return axes;
}

Event reduce_event(Draft& draft, const StageDraft& stage, const Bucket& bucket, BufferId target, CollectiveKind kind,
                   int micro_batch, std::string_view strategy) {
  const std::string name =
      std::string(kind == CollectiveKind::kAllReduce ? "reduce." : "scatter.") + signature(draft, stage, bucket);
  const SegmentId segment = draft.cached(name, [&] {
    Op op;
    op.work = Collective{kind, ReduceOp::kSum, gradients_comm(draft, reduction_axes(draft, stage, bucket)), draft.algorithm()};
    op.stream = reduction_stream(draft);
    op.label = "gradients";
    op.strategy = strategy;
    return one_op_segment(name, stage, {bucket.gradient, target}, std::move(op), {0}, {1});
  });
  return call_event(bind(segment, {bucket.gradient, target}), bucket.last_unit, micro_batch);
}

void when_complete(Draft& draft, StageDraft& stage, const std::function<Event(Bucket&)>& make) {
  const BackwardTimes times(draft, stage);
  Insertions insertions;
  for (Bucket& bucket : stage.buckets) {
    if (draft.plan.mesh.size(reduction_axes(draft, stage, bucket)) == 1) continue;  // whole already
    const size_t last = times.complete(bucket);
    const bool behind = draft.config.layout.overlap && !is_mirrored(draft.config.layout.schedule);  // else after all of backward
    insertions.after(behind ? last : stage.events.size() - 1, make(bucket));
  }
  insertions.apply(stage.events);
}

void reduce_when_complete(Draft& draft, StageDraft& stage, CollectiveKind kind, std::string_view strategy) {
  when_complete(draft, stage, [&](Bucket& bucket) {
    return reduce_event(draft, stage, bucket, bucket.reduced, kind, draft.micro_batches() - 1, strategy);
  });
}

std::string signature(const Draft& draft, const StageDraft& stage, const Bucket& bucket) {
  const Bucket::Member& m = bucket.members.front();
  const Type& type = stage.role.buffers[stage.at(m.unit, m.parameter).value.index()].type;
  const bool sliced = type.place[static_cast<size_t>(draft.plan.mesh.axis("tp"))].is_shard();
  const bool shared = is_of_shared_experts(draft, type);
  return std::to_string(bucket.elements) + (sliced ? ".sliced" : "") + (shared ? ".experts" : "") + (bucket.tied ? ".tied" : "");
}

StreamId reduction_stream(Draft& draft) { return draft.config.layout.overlap ? draft.stream("dp") : StreamId(0); }

}  // namespace shardlab::strategies
