#pragma once
#include "plan/base/units.h"
namespace shardlab {
struct Draft;
struct Event;
struct StageDraft;
struct Update;
/// See optimizer.cpp.
void optimizer(Draft& draft);
/// The call of an update on `stream`: one segment for each type that is updated.
Event update_event(Draft& draft, StageDraft& stage, const Update& update, StreamId stream);
/// One update a parameter, for layouts in which no strategy said otherwise; one a bucket where the optimizer is offloaded.
void declare_updates(Draft& draft, StageDraft& stage);
/// Appends the squared norm of all gradients of the step, f64[1], the same on every rank: what the updates read, each element once.
BufferId squared_gradient_norm(Draft& draft, StageDraft& stage);
/// The step's loss, and the squared norm of its gradients where the case asks for it.
void metrics(Draft& draft);
}  // namespace shardlab
