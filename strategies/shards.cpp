#include "strategies/shards.h"

#include "plan/techniques.h"
#include "strategies/accumulation.h"
#include "strategies/offload_gradients.h"
#include "strategies/offload_parameters.h"
#include "strategies/state.h"

namespace shardlab::strategies {

bool updates_slices(const Layout& layout) { return layout.zero > 0 || layout.parameter_server.servers > 0; }

Shards::Shards(Draft& draft, StageDraft& stage, std::string_view strategy)
    : draft_(draft), stage_(stage), strategy_(strategy), axes_(data_axes(draft.plan.mesh)), ranks_(draft.plan.mesh.size(axes_)) {}

BufferId Shards::slice_of(BufferId flat, std::string name) {
  Buffer slice = stage_.role.buffers[flat.index()];
  slice.name = std::move(name);
  const BufferId root = slice.view ? BufferId(slice.view->base) : flat;  // a bucket's gradients, under the type of their sum
  slice.view = View{root.value, 0, {}};
  if (const AxisSet axes = axes_of(slice.type); draft_.plan.mesh.size(axes) > 1) {
    slice.type.shape = {slice.type.shape[0] / draft_.plan.mesh.size(axes)};
    slice.type = placed(slice.type, axes, Placement::shard(0));
    slice.view->shard_axes = axes;
  }
  slice.packed_as = root.value;
  return add_buffer(stage_, std::move(slice));
}

AxisSet Shards::axes_of(const Type& flat) const {
  AxisSet axes;
  for (int axis = 0; axis < kMaxAxes; ++axis)
    if (axes_.contains(axis) && flat.place[static_cast<size_t>(axis)].kind != Place::kLocal) axes = axes | AxisSet::of(axis);
  return axes;
}

BufferId Shards::slice_apart(BufferId flat, std::string name) {
  const BufferId id = slice_of(flat, std::move(name));
  stage_.role.buffers[id.index()].view.reset();
  return id;
}

BufferId Shards::flat_values(const Bucket& bucket, bool persistent) {
  const Bucket::Member& first = bucket.members.front();
  Buffer flat = stage_.role.buffers[stage_.at(first.unit, first.parameter).value.index()];
  flat.name = bucket.name + ".value";
  flat.type.shape = {bucket.elements};
  flat.type = nobodys_shard(draft_, std::move(flat.type));  // as the gradients'
  flat.kind = persistent ? BufferClass::kParameter : BufferClass::kBuffer;
  flat.persistent = persistent;
  flat.parameter = -1;
  const BufferId id = add_buffer(stage_, std::move(flat));
  for (const Bucket::Member& m : bucket.members) {
    Buffer& value = stage_.role.buffers[stage_.at(m.unit, m.parameter).value.index()];
    value.view = View{id.value, m.offset, {}};
    value.persistent = persistent;
  }
  return id;
}

Call Shards::gather(const Bucket& bucket, BufferId slice, BufferId flat, StreamId stream) {
  const std::string name = "gather." + signature(draft_, stage_, bucket);
  const SegmentId segment = draft_.cached(name, [&] {
    Op op;
    const AxisSet axes = axes_of(stage_.role.buffers[flat.index()].type);
    const CommId comm = draft_.comm(axes == axes_ ? "dp.parameters" : "experts.parameters", axes);
    op.work = Collective{CollectiveKind::kAllGather, ReduceOp::kSum, comm, draft_.algorithm()};
    op.label = "parameters";
    op.stream = stream;
    op.strategy = strategy_;
    return one_op_segment(name, stage_, {slice, flat}, std::move(op), {0}, {1});
  });
  return bind(segment, {slice, flat});
}

bool Shards::shares_values(const Bucket& bucket) const {
  return bucket.tied && bucket.members.front().unit != 0 && stage_.holds(0);
}

namespace {

/// The events of one bucket, micro-batch by micro-batch.
class Scatter {
 public:
  Scatter(Draft& draft, StageDraft& stage, Bucket& bucket, Shards& shards, std::string_view strategy, const ScatterEvent& scatter,
          const BackwardTimes& times, Insertions& insertions)
      : draft_(draft),
        stage_(stage),
        bucket_(bucket),
        shards_(shards),
        strategy_(strategy),
        scatter_(scatter),
        times_(times),
        insertions_(insertions),
        leaves_(parks_parameters(draft.config) && !bucket.tied) {}

  void run() {
    order_ = times_.order(bucket_);
    const std::vector<Carry> plan = carries(order_, draft_.micro_batches(), draft_.config.canonical);
    slice_ = shards_.slice_of(bucket_.gradient, bucket_.name + ".grad.slice");
    bucket_.reduced = copy(0);
    for (size_t i = 0; i < order_.size(); ++i) micro_batch(i, plan[i]);
  }

 private:
  /// Copy 0 is the sum and lives for the step; further ones from when they are written until they have been added. Where parameters
  /// are parked outside the device all are in host memory.
  BufferId copy(int index) {
    while (static_cast<int>(copies_.size()) <= index) {
      const std::string suffix = copies_.empty() ? ".sum" : ".sum.copy" + std::to_string(copies_.size());
      const BufferId id = shards_.slice_apart(bucket_.gradient, bucket_.name + suffix);
      if (copies_.empty()) stage_.whole_step.push_back(id);
      if (leaves_) stage_.role.buffers[id.index()].space = Space::kHost;
      copies_.push_back(id);
    }
    return copies_[static_cast<size_t>(index)];
  }

  /// The i-th micro-batch in the order of backward. The slice is scattered in place, and then added to a sum, or kept as the first of
  /// one. With overlap what is done with is freed one unit of backward later, so that no free waits for a collective that just began.
  void micro_batch(size_t i, const Carry& carry) {
    const int j = order_[i];
    const size_t first = times_.first(bucket_, j), last = times_.last(bucket_, j);
    const size_t release = draft_.config.layout.overlap ? times_.next_compute(last) : last;
    const size_t again = i + 1 < order_.size() ? times_.first(bucket_, order_[i + 1]) : SIZE_MAX;
    const auto free_at_release = [&](BufferId id) {
      if (release >= again)
        insertions_.before(again, free_event(id));  // before it is allocated for the next micro-batch
      else if (release == last)
        insertions_.after(last, free_event(id));
      else
        insertions_.release_after(release, free_event(id));
    };
    insertions_.before(first, alloc_event(bucket_.gradient));
    if (auto zeros = padding_event(draft_, stage_, bucket_)) insertions_.before(first, std::move(*zeros));
    if (draft_.plan.mesh.size(reduction_axes(draft_, stage_, bucket_)) > 1)
      insertions_.after(last, scatter_
                                  ? scatter_(bucket_, slice_, j)
                                  : reduce_event(draft_, stage_, bucket_, slice_, CollectiveKind::kReduceScatter, j, strategy_));
    BufferId made = slice_;  // what this micro-batch adds to the sum
    if (carry.added.empty()) {
      if (carry.written > 0) insertions_.after(last, alloc_event(copy(carry.written)));
      insertions_.after(last, move("keep.slices.", Copy{}, {slice_, copy(carry.written)}, {0}, {1}, j, stream("d2h")));
    } else if (leaves_) {
      made = arriving();
      insertions_.after(last, alloc_event(made));
      insertions_.after(last, move("leave.slices.", Copy{}, {slice_, made}, {0}, {1}, j, stream("d2h")));
    }
    for (const auto& [to, from] : carry.added) {
      const BufferId source = from == carry.written ? made : copy(from);
      insertions_.after(last, move("add.slices.", Add{}, {copy(to), source}, {0, 1}, {0}, j, stream("cpu")));
    }
    free_at_release(bucket_.gradient);
    for (const auto& [to, from] : carry.added)
      if (from != carry.written) free_at_release(copy(from));
    if (made != slice_) free_at_release(made);
  }

  /// Host memory for a micro-batch's slice that is then added to a sum.
  BufferId arriving() {
    if (!arriving_) arriving_ = host_copy(stage_, copies_.front(), ".arriving", BufferClass::kGradient);
    return arriving_;
  }

  /// Where sums are on the device they are formed on the stream that reduces.
  StreamId stream(std::string_view away) {
    if (!leaves_) return reduction_stream(draft_);
    return draft_.config.layout.overlap || away == "cpu" ? draft_.stream(away) : StreamId(0);
  }

  Event move(const std::string& what, Work work, const std::vector<BufferId>& buffers, const std::vector<int>& reads,
             const std::vector<int>& writes, int micro_batch, StreamId on) {
    const std::string name = what + signature(draft_, stage_, bucket_);
    const SegmentId segment = draft_.cached(name, [&] {
      Op op;
      op.work = std::move(work);
      op.stream = on;
      op.label = "gradients";
      op.strategy = leaves_ ? "offload-parameters" : strategy_;
      return one_op_segment(name, stage_, buffers, std::move(op), reads, writes);
    });
    return call_event(bind(segment, buffers), bucket_.last_unit, micro_batch);
  }

  Draft& draft_;
  StageDraft& stage_;
  Bucket& bucket_;
  Shards& shards_;
  std::string_view strategy_;
  const ScatterEvent& scatter_;
  const BackwardTimes& times_;
  Insertions& insertions_;
  const bool leaves_;       ///< whether sums over micro-batches are formed in host memory
  std::vector<int> order_;  ///< micro-batches as backward takes them
  BufferId slice_, arriving_;
  std::vector<BufferId> copies_;
};

}  // namespace

void scatter_every_micro_batch(Draft& draft, StageDraft& stage, Shards& shards, std::string_view strategy,
                               const ScatterEvent& scatter) {
  for (Event& e : stage.events)
    if (e.makes_gradients()) e.first = true;  // each micro-batch has the bucket to itself
  const BackwardTimes times(draft, stage);
  Insertions insertions;
  for (Bucket& bucket : stage.buckets) Scatter(draft, stage, bucket, shards, strategy, scatter, times, insertions).run();
  insertions.apply(stage.events);
}

}  // namespace shardlab::strategies
