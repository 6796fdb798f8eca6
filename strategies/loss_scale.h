#pragma once
namespace shardlab::strategies {
struct Draft;
/// See loss_scale.cpp. The gradients of the model's segments become multiples of the scale.
void scale_loss(Draft& draft);
/// Infinities found and agreed on, the updates' predicate and factor, the scale's own rule.
void loss_scaling(Draft& draft);
}  // namespace shardlab::strategies
