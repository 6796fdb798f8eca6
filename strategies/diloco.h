#pragma once
#include "plan/plan.h"
namespace shardlab::strategies {
struct Draft;
struct StageDraft;
/// Whether the data-parallel ranks of a training step are workers, each with parameters of its own.
bool trains_apart(const Draft& draft);
/// The worker's own view of `whole`, a buffer that is the same on all workers when a period begins and ends.
BufferId worker_view(Draft& draft, StageDraft& stage, BufferId whole);
/// The loss of each inner step, on the last stage: returns the sum over a worker's sequences of the first one.
BufferId worker_loss(Draft& draft, StageDraft& stage);
/// See diloco.cpp.
void local_workers(Draft& draft);
void outer_step(Draft& draft);
}  // namespace shardlab::strategies
