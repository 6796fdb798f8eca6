// `--help`: two examples a verb, and lines that a terminal of 100 columns shows whole.
#pragma once

#include <CLI/CLI.hpp>

#include <array>
#include <span>
#include <string_view>

namespace shardlab::cli {

struct Examples {
  std::string_view verb;
  std::array<std::string_view, 2> commands;  ///< without "shardlab"
};
std::span<const Examples> examples();

/// Gives the program and its verbs, which were added before, their examples and the width of their help.
void add_help(CLI::App& app);

}  // namespace shardlab::cli
