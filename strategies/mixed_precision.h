#pragma once
#include "plan/base/units.h"
namespace shardlab::strategies {
struct Draft;
struct StageDraft;
/// See mixed_precision.cpp.
void mixed_precision(Draft& draft);
/// The fp32 copies that the optimizer updates.
void master_weights(Draft& draft);
/// An fp32 copy of what an update writes. It has no storage in common with the parameter, but its place.
BufferId add_master(StageDraft& stage, BufferId value);
}  // namespace shardlab::strategies
