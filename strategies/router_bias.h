#pragma once

#include <string_view>

namespace shardlab::strategies {
struct Draft;

/// Slots of a layer with experts, f32[e]: the biases of the choice, in forward, and the tokens of the step by expert, in backward.
inline constexpr std::string_view kRouterBiasSlot = "router.bias";
inline constexpr std::string_view kRouterLoadSlot = "router.load";

/// See router_bias.cpp: biases of routers follow the load of experts.
void balance_by_bias(Draft& draft);
}  // namespace shardlab::strategies
