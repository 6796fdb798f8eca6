#pragma once

#include <string_view>

namespace shardlab::strategies {
struct Draft;

/// What selective recompute gives up where no sub-layers are named.
inline constexpr std::string_view kAttentionCore = "attn.core";

/// See recompute.cpp.
void full_recompute(Draft& draft);
void selective_recompute(Draft& draft);
void recompute_by_layer(Draft& draft);
}  // namespace shardlab::strategies
