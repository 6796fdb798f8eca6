// What data-parallel ranks exchange, and when: gradients as they are complete, parameters ahead of their use.
#include <algorithm>
#include <bit>

#include "simulator/step_stage.h"

namespace shardlab::simulator::forms {
namespace {

double of(int64_t v) { return static_cast<double>(v); }

}  // namespace

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
  if (!c_.layout.overlap || adds_copies(c_)) return append(around_[v].after, events);
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
    const bool leaves = updates_on_host(c_) && !is_shared(b, part_) && !arrives_late(b);
    if (at_end) {
      append(at_end_, events);
      if (leaves) leave(b, around_.size(), at_end_);
    } else {
      put_within(last, b, events);
      Events then;
      if (leaves) leave(b, last, then);
      put_within(last, b, then);
    }
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
      const double slice = of(b.elements / b.ranks);
      int32_t kept = -1;
      const int64_t sums = carries(j);
      for (int64_t i = 0; i < std::max<int64_t>(1, sums); ++i)
        kept = start(there, kernels_.kernel({sums > 0 ? slice : 0, (sums > 0 ? 3 : 2) * slice * of(g)}, Spent::kData), kReducing);
      reduced_[index_of(b)] = kept;
      if (j == m - 1) sum_replicas(b, there);
      put_within(last, b, there);
      Events then;
      if (j == m - 1 && updates_on_host(c_) && !is_shared(b, part_) && !arrives_late(b)) leave(b, last, then);
      put_within(last, b, then);
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

/// How many sums are added when a micro-batch's gradients are there: the first is kept, a later one added to it at once; in
/// canonical mode as many as a binary counter carries, and at the end all that are left.
int64_t StageWriter::carries(int64_t micro_batch) const {
  if (!c_.canonical) return micro_batch > 0 ? 1 : 0;
  const auto n = static_cast<uint64_t>(micro_batch);
  return micro_batch + 1 == c_.train.grad_accumulation ? std::popcount(n) : std::countr_one(n);
}

/// What a unit's backward wrote is added, parameter by parameter, to the copies before it.
void StageWriter::count_in_binary() {
  std::array<Block, 3> adds;  // embedding, layer, head
  const bool embedding = part_.first, head = part_.last;
  if (embedding) add_copies(0, adds[0]);
  add_copies(embedding ? 1 : 0, adds[1]);
  if (head) add_copies(units_ - 1, adds[2]);
  std::array<Event, 3> events;
  for (size_t i = 0; i < adds.size(); ++i) {
    events[i] = {.index = static_cast<int32_t>(text_.blocks.size())};
    text_.blocks.push_back(adds[i]);
  }
  for (size_t v = 0; v < around_.size(); ++v) {
    const Visit at = visit(v);
    const size_t kind = is_layer(at.unit) ? 1 : embedding && at.unit == 0 ? 0 : 2;
    for (int64_t i = at.backward ? carries(at.micro_batch) : 0; i > 0; --i) around_[v].after.push_back(events[kind]);
  }
}

void StageWriter::add_copies(int64_t unit, Block& b) const {
  const Elements& n = elements_;
  const auto add = [&](std::initializer_list<int64_t> sizes) {
    for (const int64_t s : sizes) b.add(kernels_.kernel({of(s), 3 * of(s * Widths(c_).gradient)}, Spent::kBackward));
  };
  if (is_layer(unit)) {
    if (n.gpt)
      add({n.hidden, n.hidden, n.wqkv, n.bqkv, n.wo, n.hidden, n.hidden, n.hidden, n.wup, n.bup, n.wdown, n.hidden});
    else
      add({n.hidden, n.wqkv, n.wo, n.hidden, n.wup, n.wdown});
  } else {
    if (!part_.first || unit != 0) add({n.hidden});
    if (n.gpt) add({part_.first && unit == 0 ? n.positions : n.hidden});
    add({n.table});
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

}  // namespace shardlab::simulator::forms
