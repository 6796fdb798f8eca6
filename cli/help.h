// `--help`: two examples a verb, and lines that a terminal of 100 columns shows whole.
#pragma once

#include <CLI/CLI.hpp>

#include <array>
#include <span>
#include <string>
#include <string_view>

#include "plan/base/result.h"

namespace shardlab::cli {

struct Examples {
  std::string_view verb;
  std::array<std::string_view, 2> commands;  ///< without "shardlab"
};
std::span<const Examples> examples();

/// What is wrong with a command line of these words (the program's name first), in a sentence with what to do next. `end` is the
/// library's own word for it.
Error usage_error(const CLI::App& app, const CLI::ParseError& end, std::span<const std::string> words);

/// Gives the program and its verbs, which were added before, their examples and the width of their help.
void add_help(CLI::App& app);

}  // namespace shardlab::cli
