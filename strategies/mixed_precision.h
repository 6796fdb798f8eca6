#pragma once
#include "plan/base/units.h"
namespace shardlab::strategies {
struct Draft;
struct StageDraft;
/// See mixed_precision.cpp.
void mixed_precision(Draft& draft);
/// The fp32 copies that the optimizer updates.
void master_weights(Draft& draft);
/// Adds an fp32 copy of the buffer `value`, which an update writes. The copy has storage of its own.
BufferId add_master(StageDraft& stage, BufferId value);
}  // namespace shardlab::strategies
