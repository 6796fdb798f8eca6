// State that a run keeps from step to step beside the state of its parameters: persistent buffers of class `other`, the same on
// every rank. The session reads them by name, and checkpoints carry them from one layout to another.
#pragma once

#include <array>
#include <string_view>

namespace shardlab {

/// i32[1]: updates made so far. Where a role has it, the learning rate and the optimizer's bias correction go by it; elsewhere
/// every step makes one, and they go by the step's number.
inline constexpr std::string_view kAppliedSteps = "steps.applied";
/// f32[1]: 1 - d^t, the share of the running averages of the weights that t steps have filled, d the decay.
inline constexpr std::string_view kAveragedSteps = "steps.averaged";
/// f32[1]: what the loss is multiplied by; persistent where it moves.
inline constexpr std::string_view kLossScaleBuffer = "loss_scale";

/// i32[1], a metric: not 0 where the period took all its steps back (strategies/post_validation.cpp).
inline constexpr std::string_view kRolledBack = "rolled_back";

/// i32[1], a metric: not 0 where more rows came to the experts of some rank than it has room for (strategies/expert_bound.cpp). The step has
/// then changed nothing that is kept, and runs again.
inline constexpr std::string_view kOverflowed = "overflowed";

/// The stream on which a parameter server updates its parameters, at a pace of its own where workers run apart.
inline constexpr std::string_view kServerStream = "server";

/// Whether buffers of that name are the run's: what else strategies keep (an error that is fed back, say) is a rank's own.
constexpr bool names_run_state(std::string_view name) {
  for (const std::string_view family : std::array<std::string_view, 5>{"steps.", "loss_scale", "guard.", "amax.", "router_bias."})
    if (name.starts_with(family)) return true;
  return false;
}

}  // namespace shardlab
