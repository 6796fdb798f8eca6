// The buffers of a stage's state: every strategy starts from one value and one gradient a parameter.
#pragma once

#include "strategies/draft.h"

namespace shardlab::strategies {

/// Gives each stage a value (persistent) and a gradient (for the whole step) for every parameter of its units. On one stage both
/// copies of a tied weight share the value and have a gradient each.
void declare_state(Draft& draft);

/// The gradient's type of parameter `parameter` of `unit`, before any reduction.
Type gradient_type(Draft& draft, int unit, int parameter);

/// "layers.3.attn.wqkv"; the head's share of a tied table is "embed.tokens.head".
std::string state_name(const Draft& draft, int unit, int parameter);

}  // namespace shardlab::strategies
