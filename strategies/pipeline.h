#pragma once
#include <utility>
#include <vector>

#include "plan/case.h"

namespace shardlab::strategies {
struct Draft;

/// See pipeline.cpp.
void pipeline(Draft& draft);

/// One compute slot of a stage: forward or backward of one micro-batch through all of the stage's layers.
struct PipelineSlot {
  bool backward = false;
  int micro_batch = 0;
  friend bool operator==(const PipelineSlot&, const PipelineSlot&) = default;
};

/// The order in which stage `stage` of `stages` works on `micro_batches` micro-batches.
///
/// afab: all forwards, then all backwards: every micro-batch is in flight.
/// 1f1b: min(m, p - 1 - stage) forwards to warm up, then one forward and one backward in turn, then the backwards that are left:
///       at most p - stage micro-batches in flight. Both have the bubble (p-1)/(m+p-1).
/// none (one stage): one micro-batch after the other.
std::vector<PipelineSlot> pipeline_order(Schedule schedule, int stages, int stage, int micro_batches);

/// First layer of `stage` (stages are as even as can be, the first ones take the layers left over); stage == stages gives `layers`.
int first_layer(int layers, int stages, int stage);

}  // namespace shardlab::strategies
