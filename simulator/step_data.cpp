// What data-parallel ranks exchange, and when: gradients as they are complete, parameters ahead of their use.
#include "simulator/step_stage.h"

namespace shardlab::forms {

Task StageWriter::exchanged(CollectiveKind kind, const BucketForm& b, int64_t element) const {
  return kernels_.exchange({kind, c_.layout.shard_ranks(), b.elements, element}, kernels_.ways().data, Spent::kData);
}
/// Slices are summed over the sets of shards.
void StageWriter::sum_replicas(const BucketForm& b, Events& events) {
  if (c_.layout.replicas() == 1) return;
  const int64_t elements = c_.layout.zero > 0 ? b.elements / c_.layout.shard_ranks() : b.elements;
  const Exchange sum{CollectiveKind::kAllReduce, c_.layout.replicas(), elements, Widths(c_).gradient};
  reduced_[index_of(b)] = start(events, kernels_.exchange(sum, kernels_.ways().replicas, Spent::kData), kReducing);
}

/// From where the bucket's last gradient is complete; behind what left the stream before it.
void StageWriter::put_within(size_t v, const BucketForm& b, const Events& events) {
  if (!c_.layout.overlap) return append(around_[v].after, events);
  std::vector<Cut>& there = around_[v].within;
  const int32_t done = block(block_of(v)).done[static_cast<size_t>(b.last)];
  const int32_t tasks = there.empty() ? done : std::max(done, there.back().tasks);
  for (const Event& e : events) there.push_back({tasks, e});
}

/// Zero 0 and 1: a bucket is reduced once a step, when its last gradient is there.
void StageWriter::reduce_when_complete() {
  reduced_.resize(state_.buckets.size(), -1);
  for (const BucketForm& b : state_.buckets) {
    const size_t last = backward_of(b.lowest, c_.train.grad_accumulation - 1);
    Events events;
    reduced_[index_of(b)] = reduce(b, events);
    sum_replicas(b, events);
    const bool at_end = !c_.layout.overlap || (part_.first && b.lowest == 0 && meets_early());
    if (updates_on_host(c_) && !is_shared(b, part_) && !arrives_late(b)) leave(b, at_end ? around_.size() : last, events);
    if (at_end)
      append(at_end_, events);
    else
      put_within(last, b, events);
  }
}

/// Zero 2 and 3: every micro-batch is scattered, and its slice kept or added to those before. A bucket's storage is given up one
/// unit later, which waits for it.
void StageWriter::scatter_every_micro_batch() {
  const int64_t g = Widths(c_).gradient, m = c_.train.grad_accumulation;
  reduced_.resize(state_.buckets.size(), -1);
  for (const BucketForm& b : state_.buckets) {
    if (parks_parameters(c_) && !b.tied) {
      leave_every_micro_batch(b);
      continue;
    }
    for (int64_t j = 0; j < m; ++j) {
      const size_t last = backward_of(b.lowest, j), next = std::min(last + 1, last_visit());
      Events there;
      if (c_.layout.dp > 1) reduce(b, there);
      const double slice = static_cast<double>(b.elements / b.ranks);
      const double bytes = (j == 0 ? 2 : 3) * slice * static_cast<double>(g);
      const int32_t kept = start(there, kernels_.kernel({j == 0 ? 0 : slice, bytes}, Spent::kData), kReducing);
      reduced_[index_of(b)] = kept;
      if (j == m - 1) {
        sum_replicas(b, there);
        if (updates_on_host(c_) && !is_shared(b, part_) && !arrives_late(b)) leave(b, last, there);
      }
      put_within(last, b, there);
      const size_t again = j + 1 < m ? backward_of(b.highest, j + 1) : around_.size();
      await(next >= again ? around_[again].before : next == last ? around_[last].after : around_[next].released, kept);
    }
  }
}

void StageWriter::gather_before_use() {
  for (const GatherStay& stay : gather_stays(c_, state_, part_, stage_)) {
    const Task gather = exchanged(CollectiveKind::kAllGather, state_.buckets[stay.bucket], Widths(c_).value);
    await(around_[stay.first].needed, start(around_[stay.issued].before, gather, kGathering));
  }
}

/// Zeros for the tail of a bucket that has one: once a step, or for each micro-batch that has the bucket to itself.
void StageWriter::clear_padding() {
  for (const BucketForm& b : state_.buckets) {
    if (b.padding == 0) continue;
    const Task zeros = kernels_.kernel({0, static_cast<double>(b.padding * Widths(c_).gradient)}, Spent::kData);
    if (c_.layout.zero < 2 && !updates_on_host(c_))
      tail().add(zeros);
    else
      for (int64_t j = 0; j < (c_.layout.zero < 2 ? 1 : c_.train.grad_accumulation); ++j)
        around_[backward_of(b.highest, j)].before.push_back(alone(zeros));
  }
}

}  // namespace shardlab::forms
