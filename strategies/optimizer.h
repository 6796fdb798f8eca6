#pragma once
#include <string_view>

#include "plan/buffer.h"
#include "plan/op.h"
#include "plan/optimizers.h"
namespace shardlab::strategies {
struct Draft;
struct Event;
struct StageDraft;
struct Update;
/// See optimizer.cpp.
void optimizer(Draft& draft);
/// The call of an update on `stream`: one segment for each type that is updated.
Event update_event(Draft& draft, StageDraft& stage, const Update& update, StreamId stream);
/// A buffer of state beside `value`: placed as it, and no view.
Buffer state_buffer(const Buffer& value, const OptimizerState& state);
/// One update a parameter, for layouts in which no strategy said otherwise; one a bucket where the optimizer is offloaded.
void declare_updates(Draft& draft, StageDraft& stage);
/// Appends the squared norm of all gradients that the updates read, f64[1], the same on every rank, each element counted once.
/// Gradients that a loss scale has multiplied are counted without that scale.
BufferId squared_gradient_norm(Draft& draft, StageDraft& stage);
/// Appends the step's mean loss, f32[1], on the last stage; what was appended before is not computed again, nor is the norm.
BufferId step_loss(Draft& draft, StageDraft& last);
/// Appends the all-reduce of a partial number over one axis, over stages on `meeting_stream`; the result is a view of the number.
BufferId all_reduce_scalar(Draft& draft, StageDraft& stage, BufferId part, std::string_view axis, ReduceOp reduce = ReduceOp::kSum);
/// The same over several axes, called `name`.
BufferId all_reduce_scalar(Draft& draft, StageDraft& stage, BufferId part, std::string_view name, AxisSet axes,
                           ReduceOp reduce = ReduceOp::kSum);
/// The step's loss, and the squared norm of its gradients where the case asks for it.
void metrics(Draft& draft);
}  // namespace shardlab::strategies
