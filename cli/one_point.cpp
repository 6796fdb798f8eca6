#include "cli/one_point.h"

#include <fmt/format.h>

#include <algorithm>

#include "cli/common.h"
#include "cli/run_directory.h"
#include "cli/shipped.h"

namespace shardlab::cli {

void add_point_words(CLI::App& verb, PointWords& words) {
  verb.add_option("case", words.file, "a case or sweep file, as search's best.yaml, or RUN/CASE")->required();
  verb.add_option("--case", words.chosen, "the point of a sweep file that has several, by name or id");
  verb.add_option("--set", words.set, "change a key first, as key=value; may be repeated");
  verb.add_option("--machine-file", words.machine_file, "calibrated machine file that `local` means");
}

Result<sweeps::Point> point_of(const PointWords& words, sweeps::Resolution resolution) {
  const auto named = case_file(shipped_or_here(words.file));
  if (!named.ok()) return named.error();
  const std::string& file = *named;
  const auto sweep = sweeps::load_sweep(file, load_options(words.machine_file, words.set, file));
  if (!sweep.ok()) return sweep.error();
  auto expansion = sweeps::expand(*sweep, resolution);
  if (!expansion.ok()) return expansion.error();
  std::vector<sweeps::Point> found;
  for (sweeps::Point& point : expansion->points)
    if (words.chosen.empty() || point.id.starts_with(words.chosen) || point.name == words.chosen ||
        point.config.name == words.chosen)
      found.push_back(std::move(point));
  if (found.size() == 1) return std::move(found.front());
  constexpr size_t kListed = 20;
  std::string names;
  const auto& listed = found.empty() ? expansion->points : found;
  for (size_t i = 0; i < std::min(listed.size(), kListed) && !listed[i].id.empty(); ++i)
    names += fmt::format("\n  {}  {}", listed[i].id, listed[i].name);
  return Error{ExitCode::kUsage,
               words.chosen.empty() ? fmt::format("{} has {} points", file, found.size())
                                    : fmt::format("`{}` names {} points of {}", words.chosen, found.size(), file),
               "this asks about one point: name it with --case, by its name or id" + names,
               {}};
}

}  // namespace shardlab::cli
