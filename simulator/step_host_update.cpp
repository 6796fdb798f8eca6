// An optimizer that works on the host (Ren et al., "ZeRO-Offload", 2021): gradients leave as they are whole, the host updates its
// copies, and what it makes of the parameters comes back; with states on NVMe (Rajbhandari et al., "ZeRO-Infinity", 2021) by way of
// a ring of three updates in host memory: one whose state is written, one that is updated, one whose state is read.
#include <algorithm>

#include "simulator/step_stage.h"

namespace shardlab::simulator::forms {
namespace {

constexpr double kFp32 = 4;

double of(int64_t v) { return static_cast<double>(v); }

}  // namespace

/// Whether no update may begin before every gradient is there: a factor or a word is for all of them.
bool StageWriter::waits_for_all() const { return !c_.layout.offload.delayed_update && (c_.train.clip_norm > 0 || may_skip(c_)); }

/// A tied table's gradients leave when the two have been added.
bool StageWriter::arrives_late(const BucketForm& b) const { return b.tied && (!meets_early() || c_.layout.dp == 1); }

void StageWriter::list_host_updates() {
  for (const bool late : {false, true})
    for (const BucketForm& b : state_.buckets)
      if (!is_shared(b, part_) && arrives_late(b) == late)
        host_updates_.push_back({.bucket = index_of(b), .elements = of(c_.layout.zero > 0 ? b.elements / b.ranks : b.elements)});
  reduced_.resize(state_.buckets.size(), -1);
  if (host_updates_.empty()) return;
  if (c_.layout.offload.delayed_update)
    for (HostUpdate& job : host_updates_) {
      update_host_copy(job, around_.front().before);
      round_copy(job, around_.front().before);
    }
  if (!has_ring() || !c_.layout.overlap || waits_for_all()) return;
  // Before what becomes the first gradient: a bucket, or the slice that sums micro-batches.
  const BucketForm& b = state_.buckets[host_updates_.front().bucket];
  const size_t first = backward_of(c_.layout.zero < 2 ? b.highest : b.lowest, 0);
  fetch_state(0, c_.layout.zero < 2 ? around_[first].before : around_[first].after);
}

/// Without data parallelism nothing else happens to a gradient.
void StageWriter::leave_when_complete() {
  for (const BucketForm& b : state_.buckets) {
    if (is_shared(b, part_) || arrives_late(b)) continue;
    const size_t last = backward_of(b.lowest, c_.train.grad_accumulation - 1);
    Events there;
    leave(b, last, there);
    put_within(last, b, there);
  }
}

void StageWriter::leave_late() {
  for (const BucketForm& b : state_.buckets)
    if (!is_shared(b, part_) && arrives_late(b)) leave(b, around_.size(), text_.events);
}

/// A bucket, or the rank's slice of it, is whole after visit `v`, or after all of them. Its place on the device is given up one
/// visit later, that of a slice at the end of the step. Where room in host memory is made for each gradient, the ring turns before.
void StageWriter::leave(const BucketForm& b, size_t v, Events& there) {
  const bool last = v >= last_visit(), in_turn = has_ring() && !keeps_host_gradients(c_);
  Events& after = v == around_.size() ? there : around_[v].after;
  HostUpdate& job = host_updates_[arrived_];
  if (in_turn && c_.layout.overlap && !waits_for_all()) turn_ring(arrived_, after);
  int32_t& reduced = reduced_[index_of(b)];
  reduced = start(in_turn || adds_copies(c_) ? after : there, kernels_.host_copy(job.elements * of(Widths(c_).gradient), false),
                  kToHost, {reduced, job.updated});
  const int32_t left = reduced;
  follow(v, there);
  if (c_.layout.zero < 2) await(last ? after : around_[v + 1].released, left);
}

/// The update of a gradient that is in host memory, or on its way.
void StageWriter::follow(size_t v, Events& there) {
  const size_t index = arrived_++;
  // With a delay its parameters, of which this backward was the last reader, are given back.
  if (c_.layout.offload.delayed_update) return give_back(host_updates_[index], there);
  // Without overlap updates come behind all that the host adds up.
  if (waits_for_all() || (!c_.layout.overlap && (has_ring() || adds_on_host()))) return;
  Events& after = v == around_.size() ? there : around_[v].after;
  work(index, !keeps_host_gradients(c_), has_ring() || adds_copies(c_) ? after : there);
}

/// What of an update's state is in files: its copy of the parameters (in fp32 the parameters themselves), and the moments.
int StageWriter::states_in_files() const {
  const OffloadTo states = c_.layout.offload.optimizer, parameters = c_.layout.offload.parameters;
  const bool apart = Widths(c_).master || parameters == OffloadTo::kNone;
  const int moments = states == OffloadTo::kNvme && c_.train.optimizer == Optimizer::kAdamW ? 2 : 0;
  return ((apart ? states : parameters) == OffloadTo::kNvme ? 1 : 0) + moments;
}

/// One update, its state to the file, its result to the device. With a ring a result is rounded into a place in it, which turns
/// before where it has not; the state has its place already.
void StageWriter::work(size_t index, bool turned, Events& to) {
  HostUpdate& job = host_updates_[index];
  const bool overlap = c_.layout.overlap, turns = has_ring() && overlap && !turned, rounds = Widths(c_).master;
  const bool behind_result = rounds && c_.layout.offload.parameters == OffloadTo::kNvme;  // on its way to a file, too
  update_host_copy(job, to);
  if (overlap && !behind_result) put_back(job, to);
  if (turns && rounds) turn_ring(index, to);
  round_copy(job, to);
  if (overlap) give_back(job, to);
  if (overlap && behind_result) put_back(job, to);
  if (turns && !rounds) turn_ring(index, to);
}

void StageWriter::fetch_state(size_t index, Events& to) {
  HostUpdate& job = host_updates_[index];
  for (int i = 0; i < states_in_files(); ++i) job.read = start(to, kernels_.file_copy(kFp32 * job.elements, false), kFromFile);
}

void StageWriter::update_host_copy(HostUpdate& job, Events& to) {
  const double moments = c_.train.optimizer == Optimizer::kAdamW ? 2 : 0;
  const double bytes = job.elements * (of(Widths(c_).gradient) + 2 * kFp32 * (1 + moments));
  job.updated = start(to, kernels_.on_host(bytes, Spent::kUpdate), kHost, {reduced_[job.bucket], job.read});
}

/// The state to its file.
void StageWriter::put_back(HostUpdate& job, Events& to) {
  for (int i = 0; i < states_in_files(); ++i)
    job.written = start(to, kernels_.file_copy(kFp32 * job.elements, true), kToFile, {job.updated});
}

void StageWriter::round_copy(HostUpdate& job, Events& to) {
  if (!Widths(c_).master) return;
  const double bytes = job.elements * (kFp32 + of(Widths(c_).value));
  job.rounded = start(to, kernels_.on_host(bytes, Spent::kUpdate), kHost, {job.updated});
}

/// The result to the device, or to the file where the parameters wait. In host memory it was made where they do.
void StageWriter::give_back(HostUpdate& job, Events& to) {
  const OffloadTo parameters = c_.layout.offload.parameters;
  const double bytes = job.elements * of(Widths(c_).value);
  if (parameters == OffloadTo::kNone)
    job.returned = start(to, kernels_.host_copy(bytes, true), kToDevice, {job.rounded >= 0 ? job.rounded : job.updated});
  else if (parameters == OffloadTo::kNvme && Widths(c_).master)
    job.returned = start(to, kernels_.file_copy(bytes, true), kToFile, {job.rounded});
}

/// Its place in the ring is the next one's.
void StageWriter::forget(const HostUpdate& job, Events& to) {
  await(to, job.written);
  if (job.rounded >= 0) await(to, job.returned);
}

void StageWriter::turn_ring(size_t job, Events& to) {
  if (job >= 2) forget(host_updates_[job - 2], to);
  if (job + 1 < host_updates_.size()) fetch_state(job + 1, to);
}

/// What is left after backward: all updates, or those that follow it, and the gathers of slices.
void StageWriter::update_on_host() {
  if (c_.train.clip_norm > 0 || c_.train.precision == "fp16") tail().add(kernels_.host_copy(kFp32, false));
  if (may_skip(c_)) tail().add(kernels_.host_copy(kFp32, false));
  Events then;
  const bool ring = has_ring(), overlap = c_.layout.overlap, waits = waits_for_all();
  if (overlap && waits && ring && !host_updates_.empty()) fetch_state(0, then);
  const bool delayed = c_.layout.offload.delayed_update, in_files = states_in_files() > 0;
  for (size_t k = 0; k < host_updates_.size(); ++k) {
    HostUpdate& job = host_updates_[k];
    const bool behind = waits || (!overlap && adds_on_host());
    if (!delayed && behind && (overlap || !ring)) work(k, false, then);
    if (overlap || !ring) continue;
    // One after the other; but the host goes on to the next where nothing of it has to be read first.
    if (in_files) fetch_state(k, then);
    if (in_files || k == 0) update_host_copy(job, then);
    round_copy(job, then);
    if (!in_files && k + 1 < host_updates_.size()) update_host_copy(host_updates_[k + 1], then);
    give_back(job, then);
    put_back(job, then);
  }
  if (!delayed && !overlap && !ring)
    for (HostUpdate& job : host_updates_) give_back(job, then);
  if (c_.layout.zero == 1 || c_.layout.zero == 2)
    for (const BucketForm& b : state_.buckets) {
      const auto job = std::ranges::find(host_updates_, index_of(b), &HostUpdate::bucket);
      if (job == host_updates_.end()) continue;
      start(then, exchanged(CollectiveKind::kAllGather, b, Widths(c_).value), kReducing, {job->returned});
    }
  emit_all(then);
  if (c_.layout.offload.delayed_update) trifles(2);
  then.clear();
  for (size_t k = host_updates_.size() < 2 ? 0 : host_updates_.size() - 2; ring && k < host_updates_.size(); ++k)
    forget(host_updates_[k], then);
  emit_all(then);
}

}  // namespace shardlab::simulator::forms
