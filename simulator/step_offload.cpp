// State that waits outside the device: what copies it there and back, and who waits for the copies.
#include <algorithm>
#include <limits>

#include "simulator/step_stage.h"

namespace shardlab::forms {

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

}  // namespace shardlab::forms
