#pragma once

#include <vector>

#include "strategies/draft.h"

namespace shardlab::strategies {

/// See offload_activations.cpp.
void offload_activations(Draft& draft);

/// The slots that `emit` parks for a unit: slots of its backward that forward filled, in their order.
std::vector<SlotId> parked_slots(const DraftSegment& backward);
/// The slot `slot` moved to host memory, and moved to NVMe.
Slot host_slot(Slot slot);
Slot nvme_slot(Slot slot);
/// The copies of all of them that an event of kind kPark, kRead or kFetch makes. Each tensor's places are bound in turn: on the
/// device (not of kRead), in host memory, on NVMe (not of kFetch, and only where activations wait there).
SegmentId parking_segment(Draft& draft, int unit, Event::Kind kind);

}  // namespace shardlab::strategies
