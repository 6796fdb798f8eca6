// Parameter offload (ZeRO-Infinity): the slices that ZeRO-3 leaves to each rank wait in host memory or on NVMe, so that no state of
// the model is on the device but what computes. A slice is copied to the device where its unit is gathered, as far ahead as gathers
// are (`fsdp.prefetch`), and given up when the gather is done; from NVMe it is read one unit further ahead, into host memory. With
// dp = 1 there is nobody to gather from: a unit's parameters are copied to where they compute, which is plain layer streaming.
//
// Gradients leave too: what a micro-batch's scatter leaves to the rank is copied to host memory, where micro-batches are added up
// in the order in which they would be on the device. (A tied table's two gradients are added on the device, and leave once.)
//
// The optimizer is on the host or on NVMe itself. In fp32 it updates the slices where they wait; fp32 copies of 16-bit slices are
// rounded into them there. What is on NVMe takes part in the optimizer's ring (offload_optimizer.cpp): read, updated and written
// while the updates before and after are written and read.
//
// Copies and sums are those of ZeRO-3, so no bit changes.
//
// Shapes   slices [n/N]
// Adds     per gather of ZeRO-3 a copy of the slice to the device, and from NVMe a read: 2 Psi/N a micro-batch; per micro-batch a
//          copy of the gradients' slices: Psi/N; per step on NVMe a write of the parameters
// Memory   device: 1 + prefetch units whole, a slice of the one that is gathered, the buckets under way; host: parameters and
//          gradients 1/N each; with parameters on NVMe the host has two units' slices of them
// Refuses  zero other than 3 (dp = 1 is legal); an optimizer on the device; hybrid sharding, whose sets add gradients on the device
//          (`check`)
// Paper    Rajbhandari et al., "ZeRO-Infinity" (2021), sections 5 and 6
#include "strategies/offload_parameters.h"

#include "strategies/offload_gradients.h"

namespace shardlab::strategies {
namespace {

constexpr std::string_view kOffloadParametersName = "offload-parameters";

}  // namespace

ParkedParameters::ParkedParameters(Draft& draft, StageDraft& stage)
    : draft_(draft), stage_(stage), nvme_(draft.config.layout.offload.parameters == OffloadTo::kNvme) {}

StreamId ParkedParameters::stream(std::string_view name) const {
  return draft_.config.layout.overlap ? draft_.stream(name) : StreamId(0);
}

void ParkedParameters::park(BufferId slice) {
  stage_.role.buffers[slice.index()].space = nvme_ ? Space::kNvme : Space::kHost;
  if (nvme_) staged_[slice.value] = host_copy(stage_, slice, ".read", BufferClass::kBuffer);
}

std::vector<Event> ParkedParameters::read(BufferId slice) {
  if (!nvme_) return {};
  return {alloc_event(staged(slice)),
          copy_event(draft_, stage_, "read.parameters", slice, staged(slice), stream("nvme.read"), kOffloadParametersName)};
}

Event ParkedParameters::fetch(BufferId slice, BufferId to) {
  return copy_event(draft_, stage_, "fetch.parameters", nvme_ ? staged(slice) : slice, to, stream("h2d"), kOffloadParametersName);
}

std::vector<Event> ParkedParameters::give_up(BufferId slice) {
  if (!nvme_) return {};
  return {free_event(staged(slice))};
}

BufferId ParkedParameters::on_device(BufferId slice) {
  Buffer copy = stage_.role.buffers[slice.index()];
  copy.name += ".fetched";
  copy.kind = BufferClass::kBuffer;
  copy.space = Space::kDevice;
  copy.persistent = false;
  return add_buffer(stage_, std::move(copy));
}

}  // namespace shardlab::strategies
