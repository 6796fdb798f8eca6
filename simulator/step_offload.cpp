// State that waits outside the device: what copies it there and back, and who waits for the copies.
#include <algorithm>
#include <limits>

#include "simulator/step_stage.h"

namespace shardlab::simulator::forms {

/// What each layer's forward leaves for its backward, but where fewer than one unit would compute meanwhile, or, on NVMe, it would
/// have to be read before it is written.
void StageWriter::park_activations() {
  const bool ring = c_.layout.offload.activations == OffloadTo::kNvme && c_.layout.overlap;
  for (size_t v = 0; v < around_.size(); ++v) {
    const Visit at = visit(v);
    if (!at.backward || !is_layer(at.unit) || !treatments_.of(layer_of_unit(at.unit)).parked) continue;
    const size_t forward = forward_of(at.unit, at.micro_batch);
    if (forward + (ring ? 5 : 4) <= v) park(forward, v, treatments_.of(layer_of_unit(at.unit)));
  }
}

/// Out when forward is over, by way of host memory; back while the visit before backward computes, read one visit earlier. Storage
/// on the way is given up a visit later each time, which waits for the copy. Backward waits for each tensor where it first reads
/// it.
void StageWriter::park(size_t forward, size_t backward, const LayerTreatment& treatment) {
  const bool drive = c_.layout.offload.activations == OffloadTo::kNvme, overlap = c_.layout.overlap;
  const std::vector<Kept> kept = kernels_.kept(treatment);
  int32_t out = -1, written = -1;
  for (const Kept& k : kept) {
    out = start(around_[forward].after, kernels_.host_copy(k.bytes, false), kToHost);
    if (drive) written = start(around_[forward].after, kernels_.file_copy(k.bytes, true), kToFile, {out});
  }
  await(around_[forward + 1].released, out);
  await(around_[forward + 2].released, written);
  std::vector<int32_t> read(kept.size(), -1), back(kept.size(), -1);
  for (size_t i = 0; drive && i < kept.size(); ++i)
    read[i] = start(around_[overlap ? backward - 2 : backward].before, kernels_.file_copy(kept[i].bytes, false), kFromFile);
  for (size_t i = 0; i < kept.size(); ++i)
    back[i] =
        start(around_[overlap ? backward - 1 : backward].before, kernels_.host_copy(kept[i].bytes, true), kToDevice, {read[i]});
  if (!overlap) return;
  if (drive) await(around_[backward - 1].released, back.back());
  int32_t earliest = std::numeric_limits<int32_t>::max();  // copies follow one another: a later one that is there vouches for these
  const auto& needed = block(block_of(backward)).needed;
  for (size_t i = kept.size(); i-- > 0;) {
    const int32_t task = needed[kept[i].tensor];
    if (task < earliest) around_[backward].arrivals.push_back({task, await(back[i])});
    earliest = std::min(earliest, task);
  }
}

/// A rank's slice on its way to where it is gathered, or, where nobody else has slices, used. What it takes on the way is given up
/// when the visit that it was fetched with has computed.
void StageWriter::fetch_before_use() {
  const bool drive = c_.layout.offload.parameters == OffloadTo::kNvme;
  for (const GatherStay& stay : gather_stays(c_, state_, part_, stage_)) {
    const BucketForm& b = state_.buckets[stay.bucket];
    const double bytes = static_cast<double>(b.elements / b.ranks * Widths(c_).value);
    int32_t read = -1, whole = -1;
    if (drive) read = start(around_[stay.read].before, kernels_.file_copy(bytes, false), kFromFile);
    const int32_t fetched = whole = start(around_[stay.issued].before, kernels_.host_copy(bytes, true), kToDevice, {read});
    if (c_.layout.dp > 1) {
      const Task gather = exchanged(CollectiveKind::kAllGather, b, Widths(c_).value);
      whole = start(around_[stay.issued].before, gather, kGathering, {fetched});
      await(around_[stay.passed].released, whole);
    }
    if (drive) await(around_[stay.passed].released, fetched);
    await(around_[stay.first].needed, whole);
  }
}

/// Where parameters are in host memory micro-batches are added up there.
void StageWriter::leave_every_micro_batch(const BucketForm& b) {
  const int64_t g = Widths(c_).gradient, m = c_.train.grad_accumulation;
  const double bytes = static_cast<double>(b.elements / b.ranks * g);
  for (int64_t j = 0; j < m; ++j) {
    const size_t last = backward_of(b.lowest, j), next = c_.layout.overlap ? std::min(last + 1, last_visit()) : last;
    Events there;
    int32_t scattered = -1, added = -1;
    if (c_.layout.dp > 1) scattered = start(there, exchanged(CollectiveKind::kReduceScatter, b, g), kReducing);
    put_within(last, b, there);
    // Room for what is then added is made when the visit is over.
    Events room;
    const int32_t out = start(room, kernels_.host_copy(bytes, false), kToHost, {scattered});
    if (j > 0) added = start(room, kernels_.on_host(3 * bytes, Spent::kData), kHost, {out});
    reduced_[index_of(b)] = j > 0 ? added : out;
    if (j > 0)
      append(around_[last].after, room);
    else
      put_within(last, b, room);
    Events then;
    if (j == m - 1) follow(last, then);
    if (j > 0)
      append(around_[last].after, then);
    else
      put_within(last, b, then);
    const size_t again = j + 1 < m ? backward_of(b.highest, j + 1) : around_.size();
    for (const int32_t number : {out, added})
      await(next >= again ? around_[again].before : next == last ? around_[last].after : around_[next].released, number);
  }
}

}  // namespace shardlab::simulator::forms
