#pragma once
namespace shardlab {
struct Draft;
/// See optimizer.cpp.
void optimizer(Draft& draft);
/// The step's loss, and the squared norm of its gradients where the case asks for it.
void metrics(Draft& draft);
}  // namespace shardlab
