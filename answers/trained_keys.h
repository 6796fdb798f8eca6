// The keys that say which weights are trained.
#pragma once

#include <array>
#include <string_view>

namespace shardlab::answers {

/// Adapters and frozen modules. No case holds them; estimates do.
inline constexpr std::array<std::string_view, 4> kTrainedKeys{"train.lora_rank", "train.lora_targets", "train.frozen",
                                                              "train.frozen_bits"};

}  // namespace shardlab::answers
