#pragma once

#include <vector>

#include "strategies/draft.h"

namespace shardlab {

/// See offload_activations.cpp.
void offload_activations(Draft& draft);

/// What `emit` parks for a unit: the slots of its backward that forward filled, in their order.
std::vector<SlotId> parked_slots(const DraftSegment& backward);
/// The same slot in host memory.
Slot host_slot(Slot slot);
/// The copies of all of them, out to host memory or in: each tensor's place on the device and on the host are bound in turn.
SegmentId parking_segment(Draft& draft, int unit, bool out);

}  // namespace shardlab
