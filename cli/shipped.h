// What ships beside the program: sweeps, models, machines, profiles and documents under PREFIX/share/shardlab, by the names of the source
// tree.
#pragma once

#include <string>

#include "cli/namespaces.h"

namespace shardlab::cli {

/// PREFIX/share/shardlab of the program PREFIX/bin/shardlab; empty where there is no such folder, as beside a program that was built and
/// not installed.
std::string shipped_folder();

/// The path itself where such a file is there, or none ships; else the shipped file of that name.
std::string shipped_or_here(const std::string& path, const std::string& folder = shipped_folder());

/// A text with the names of shipped files, as "docs/limits.md", by their full paths: a message of an installed program names files that
/// its reader has. `folder` empty: the text as it is.
std::string with_shipped_paths(const std::string& text, const std::string& folder = shipped_folder());

}  // namespace shardlab::cli
