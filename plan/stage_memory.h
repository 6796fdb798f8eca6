// What each stage of a mixed machine needs of its own device.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "plan/outcome.h"

namespace shardlab {

/// The need of each stage, for a decided case on a mixed machine: the stage's device and layers, and its live peak, which `peak_of` gives,
/// before packing. Units: bytes of one rank.
std::vector<StageNeed> memory_by_stage(const Case& config, const std::function<int64_t(int stage)>& peak_of);

/// Index of the stage that lacks the most bytes on its device, the first one of equals; nothing if all stages fit.
std::optional<int> stage_that_lacks(const std::vector<StageNeed>& stages);

/// "stage 0: 27 layers on h100-sxm5-80gb, 61.2 GiB of 80.0 GiB; stage 1: ..."; empty where there are no stages.
std::string stages_text(const std::vector<StageNeed>& stages, const std::function<std::string(int64_t bytes)>& bytes_text);

}  // namespace shardlab
