#pragma once

#include <string_view>

namespace shardlab::strategies {
struct Draft;

/// The sub-layer whose results selective recompute gives up if the case names no sub-layers.
inline constexpr std::string_view kAttentionCore = "attn.core";

/// See recompute.cpp.
void full_recompute(Draft& draft);
void selective_recompute(Draft& draft);
void recompute_by_layer(Draft& draft);
}  // namespace shardlab::strategies
