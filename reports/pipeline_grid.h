// The pipeline as a grid of stages and time: each run of work on a micro-batch is one slot.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/program.h"
#include "plan/trace.h"

namespace shardlab::reports {

/// Consecutive compute ops of one rank on one micro-batch in one phase and one part of the model.
struct GridSlot {
  char phase = 'F';      ///< F, B (gradients of input and weights), I, W, or U: of no micro-batch, as the update is
  int micro_batch = -1;  ///< -1 under "U"
  int layer = -1;        ///< the first layer of the slot, -1 where none has a number
  double begin_s = 0;    ///< from the start of the step
  double end_s = 0;
};

/// The slots of one rank in one step, in order of time, from the ops of its compute stream (stream 0), communication apart. Forward
/// that is made again belongs to the backward around it.
///
/// `programs` are indexed by role; `origin` is when the step began.
std::vector<GridSlot> grid_slots(const Plan& plan, const std::vector<Program>& programs, const Trace& trace, int rank, int step,
                                 double origin);

}  // namespace shardlab::reports
