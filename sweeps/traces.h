// The cases of a sweep that leave their traces in the run directory.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "sweeps/sweep.h"

namespace shardlab::sweeps {

/// none: no case. measured: cases that are measured, with their predictions; a sweep that only simulates leaves none. all: every
/// case that the timeline predicts, too. A trace is what a report draws a timeline of; figures and the rows by op need none.
enum class Traces : uint8_t { kNone, kMeasured, kAll };
std::string_view name_of(Traces traces);  ///< "none", "measured", "all"
std::optional<Traces> traces_named(std::string_view name);

/// The choice that the file makes; kMeasured if it makes none.
Traces traces_of(const Sweep& sweep);

}  // namespace shardlab::sweeps
