// The models and machines that ship with the program: their files, compiled in (sweeps/CMakeLists.txt writes the table).
#pragma once

#include <span>
#include <string_view>

namespace shardlab::sweeps {

/// One shipped file: its name without the ending, and its text.
struct Preset {
  std::string_view name;
  std::string_view text;
};

std::span<const Preset> model_presets();    ///< sweeps/models/*.json, sorted by name
std::span<const Preset> machine_presets();  ///< sweeps/machines/*.yaml, sorted by name

}  // namespace shardlab::sweeps
