// The end of a step: what is left of the gradients' way, what judges them, updates, metrics.
#include <utility>

#include "simulator/step_stage.h"

namespace shardlab::simulator::forms {

Block& StageWriter::tail() {
  const bool open =
      !text_.events.empty() && text_.events.back().kind == Event::Kind::kWork && text_.events.back().index == tail_ && tail_ >= 0;
  if (!open) {
    text_.blocks.emplace_back();
    tail_ = static_cast<int32_t>(text_.blocks.size()) - 1;
    emit({.index = tail_});
  }
  return text_.blocks[static_cast<size_t>(tail_)];
}
void StageWriter::trifles(int n) {
  for (int i = 0; i < n; ++i) tail().add(kernels_.trifle());
}

void StageWriter::meet(const Exchange& exchange, const Ways::Way& way, int stages, int32_t number) {
  text_.tasks.push_back(kernels_.exchange(exchange, way, Spent::kPipeline));
  emit({.kind = Event::Kind::kMeet, .index = static_cast<int32_t>(text_.tasks.size()) - 1, .times = stages, .number = number});
}
/// A number that all ranks of an axis agree on.
void StageWriter::agree_tp(int64_t element) {
  if (c_.layout.tp > 1)
    tail().add(kernels_.exchange({CollectiveKind::kAllReduce, c_.layout.tp, 1, element}, kernels_.ways().tp, Spent::kTensor));
}
void StageWriter::agree_dp(int64_t element) {
  if (c_.layout.shard_ranks() > 1)
    tail().add(
        kernels_.exchange({CollectiveKind::kAllReduce, c_.layout.shard_ranks(), 1, element}, kernels_.ways().data, Spent::kData));
}
void StageWriter::agree_pp(int64_t element) {
  if (c_.layout.pp > 1)
    meet({CollectiveKind::kAllReduce, c_.layout.pp, 1, element}, kernels_.ways().all_stages, c_.layout.pp, ++meetings_);
}

/// Elements of gradients that the rank updates with.
int64_t StageWriter::own_gradients() const {
  if (c_.layout.zero == 0)
    return elements_.of(part_) - (part_.first && part_.last && c_.model.tied_embeddings ? elements_.table : 0);
  int64_t n = 0;
  for (const BucketForm& b : state_.buckets)
    if (!is_shared(b, part_)) n += b.elements / b.ranks;
  return n;
}

void StageWriter::await_all() {
  for (int32_t& number : reduced_) {
    if (number >= 0) emit(await(number));
    number = -1;
  }
}

void StageWriter::finish() {
  const double g = static_cast<double>(Widths(c_).gradient);
  if (meets_early()) add(static_cast<double>(elements_.table), 3 * static_cast<double>(elements_.table) * g);
  emit_all(at_end_);
  tie();
  if (updates_on_host(c_)) leave_late();
  const bool scales = c_.train.precision == "fp16", guards = c_.train.guard.nonfinite != GuardAction::kNone;
  if (scales) {
    find_infinities();
    trifles(c_.train.loss_scale == 0 ? 3 : 1);
  }
  if (c_.train.clip_norm > 0) {
    square_gradients();
    trifles(scales ? 3 : 2);
  }
  if (guards) find_infinities();
  judge_spikes();
  decide();
  updates_on_host(c_) ? update_on_host() : c_.layout.zero == 0 ? update_parameters() : update_slices();
  if (remembers_amax(c_)) kernels_.add_remembering(part_.layers, tail());
  metrics();
  give_up_sent(table_.slots() + 2);
}

/// A tied table's two gradients, where they are added after they were reduced.
void StageWriter::tie() {
  if (!c_.model.tied_embeddings || meets_early() || !(part_.first || part_.last)) return;
  const int64_t slices = c_.layout.zero > 0 ? c_.layout.shard_ranks() : 1;
  int64_t elements = elements_.table;
  for (const BucketForm& b : state_.buckets)
    if (b.tied) elements = b.elements / slices;
  for (size_t b = 0; b < reduced_.size(); ++b)
    if (state_.buckets[b].tied && reduced_[b] >= 0) emit(await(reduced_[b]));
  const int64_t g = Widths(c_).gradient;
  if (c_.layout.pp > 1)
    meet({CollectiveKind::kAllReduce, 2, elements, g}, kernels_.ways().ends, 2, 0);
  else
    add(static_cast<double>(elements), 3.0 * static_cast<double>(elements * g));
}

void StageWriter::find_infinities() {
  await_all();
  const double bytes = static_cast<double>(own_gradients() * Widths(c_).gradient);
  if (updates_on_host(c_))  // read over the bus
    tail().add(kernels_.host_copy(bytes / 2, c_.train.guard.nonfinite == GuardAction::kNone));
  else
    add(0, bytes);
  agree_tp();
  if (c_.layout.zero > 0) agree_dp();
  agree_pp();
}

void StageWriter::square_gradients() {
  if (std::exchange(squared_, true)) return;
  await_all();
  const double n = static_cast<double>(own_gradients()), bytes = n * static_cast<double>(Widths(c_).gradient);
  const auto square = [&](double flops, double read) {
    if (!updates_on_host(c_)) return add(flops, read);
    tail().add(kernels_.on_host(read, Spent::kUpdate));
    tail().add(kernels_.host_copy(8, true));
  };
  square(2 * n, bytes);
  if (c_.layout.tp > 1) {  // and what every rank has whole
    agree_tp(8);
    square(0, 8);
    trifles(1);
  }
  if (c_.layout.zero > 0) agree_dp(8);
  agree_pp(8);
  trifles(1);
}

/// In the order of the model, of which the first was reduced last, but for what is in buckets of its own behind the table's.
void StageWriter::update_parameters() {
  const bool shared = part_.first && part_.last && c_.model.tied_embeddings;
  const Elements& n = elements_;
  const auto update = [&](std::initializer_list<int64_t> sizes) {
    for (const int64_t s : sizes) kernels_.add_update(s, tail());
  };
  for (size_t b = 0; part_.first && b < reduced_.size(); ++b)
    if (state_.buckets[b].lowest == 0 && state_.buckets[b].elements >= n.table) await(text_.events, std::exchange(reduced_[b], -1));
  if (!part_.first) await_all();
  if (part_.first) update({n.table});
  await_all();
  if (part_.first && n.gpt) update({n.positions});
  for (int64_t l = 0; l < part_.layers; ++l) {
    if (n.gpt)
      update({n.hidden, n.hidden, n.wqkv, n.bqkv, n.wo, n.hidden, n.hidden, n.hidden, n.wup, n.bup, n.wdown, n.hidden});
    else
      update({n.hidden, n.wqkv, n.wo, n.hidden, n.wup, n.wdown});
  }
  if (!part_.last) return;
  update({n.hidden});
  if (n.gpt) update({n.hidden});
  if (!shared) update({n.table});
}

/// Bucket by bucket; under zero 1 and 2 the whole values are gathered behind.
void StageWriter::update_slices() {
  for (const BucketForm& b : state_.buckets) {
    if (is_shared(b, part_)) continue;
    const int32_t number = index_of(b) < reduced_.size() ? std::exchange(reduced_[index_of(b)], -1) : -1;
    if (number >= 0) emit(await(number));
    kernels_.add_update(b.elements / b.ranks, tail());
    if (c_.layout.zero == 3) continue;
    start(text_.events, exchanged(CollectiveKind::kAllGather, b, Widths(c_).value), kReducing);
  }
}

/// A bound, a window and the verdict, of the norm and of the loss; the last stage tells the others of the loss.
void StageWriter::judge_spikes() {
  if (judges_norm(c_)) {
    square_gradients();
    trifles(3);
  }
  if (!judges_loss(c_)) return;
  if (part_.last) {
    sum_losses();
    trifles(3);
  }
  if (c_.layout.pp > 1) trifles(1);
  agree_pp();
}

/// All flags in one, whether to update, the count of updates; and the means, which a spike does not enter.
void StageWriter::decide() {
  if (!may_skip(c_)) return;
  const bool scales = c_.train.precision == "fp16", guards = c_.train.guard.nonfinite != GuardAction::kNone;
  const int flags = scales + guards + judges_norm(c_) + judges_loss(c_);
  trifles((flags > 1 ? 1 : 0) + 2);
  trifles(judges_norm(c_) + (judges_loss(c_) && part_.last));
}

void StageWriter::sum_losses() {
  if (!part_.last || std::exchange(summed_, true)) return;
  const bool gathers = shares_micro_batches_out(c_);
  const Exchange all{CollectiveKind::kAllGather, c_.layout.shard_ranks(), c_.train.micro_batch * c_.layout.shard_ranks(), 4};
  for (int64_t j = 0; gathers && j < c_.train.grad_accumulation; ++j)
    tail().add(kernels_.exchange(all, kernels_.ways().data, Spent::kData));
  trifles(1);
  if (!gathers) agree_dp();
  const Exchange one{CollectiveKind::kAllReduce, c_.layout.replicas(), 1, 4};
  if (c_.layout.replicas() > 1) tail().add(kernels_.exchange(one, kernels_.ways().replicas, Spent::kData));
  trifles(1);
}

void StageWriter::metrics() {
  sum_losses();
  if (c_.train.grad_norm) square_gradients();
}

}  // namespace shardlab::simulator::forms
