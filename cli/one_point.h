// The one point that a case file, a sweep file or a case of a run directory means.
#pragma once

#include <CLI/CLI.hpp>

#include <string>
#include <vector>

#include "cli/namespaces.h"
#include "plan/base/result.h"
#include "sweeps/resolution.h"
#include "sweeps/sweep.h"

namespace shardlab::cli {

struct PointWords {
  std::string file;          ///< of a case or sweep, or RUN/CASE
  std::string chosen;        ///< of a sweep of several points: the name or id of one
  std::string machine_file;  ///< that `local` means
  std::vector<std::string> set;
};
void add_point_words(CLI::App& verb, PointWords& words);

/// The only point of the file, or the one that is named. Refuses none and several, with their names. Whether the point itself is
/// refused is not asked.
Result<sweeps::Point> point_of(const PointWords& words, sweeps::Resolution resolution);

}  // namespace shardlab::cli
