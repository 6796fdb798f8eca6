// The measured runs that ship with the program: simulator/published/runs, compiled in (CMakeLists.txt beside this
// writes the table).
#pragma once

#include <span>
#include <string_view>

namespace shardlab::simulator::validation {

/// One shipped file: its name without the ending, and its text.
struct PublishedFile {
  std::string_view name;
  std::string_view text;
  bool untuned = false;  ///< of a sweep or a test, whose layouts nobody picked
};

std::span<const PublishedFile> published_runs();  ///< simulator/published/runs/*.csv, then runs/untuned/*.csv, each sorted by name
std::span<const PublishedFile>
published_machines();  ///< machines of these runs that no preset is: simulator/published/runs/machines/*.yaml

}  // namespace shardlab::simulator::validation
