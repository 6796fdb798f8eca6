#include "cli/run_directory.h"

#include <fmt/format.h>

#include <filesystem>

#include "cli/namespaces.h"
#include "plan/base/files.h"

namespace shardlab::cli {

Result<Store> open_store(const std::string& directory) {
  if (!is_there(directory))
    return Error{ExitCode::kUsage,
                 fmt::format("there is no directory {}", directory),
                 "name the one that `shardlab run` wrote: it says which at its end, runs/NAME without --out",
                 {}};
  if (!is_there(directory + "/results.sqlite"))
    return Error{ExitCode::kUsage,
                 fmt::format("{} holds no results: it has no results.sqlite", directory),
                 "name the directory that `shardlab run` wrote, or a case in it as DIRECTORY/CASE",
                 {}};
  return Store::open_existing(directory + "/results.sqlite");
}

std::pair<std::string, std::string> split_case(const std::string& where) {
  std::filesystem::path path = std::filesystem::path(where).lexically_normal();
  if (!path.has_filename()) path = path.parent_path();  // a completed folder name ends in a slash
  if (is_there(path / "results.sqlite") || !path.has_parent_path()) return {path.string(), ""};
  if (!is_there(path.parent_path() / "results.sqlite")) return {path.string(), ""};  // no run, and no case of one
  return {path.parent_path().string(), path.filename().string()};
}

}  // namespace shardlab::cli
