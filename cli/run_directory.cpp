#include "cli/run_directory.h"

#include <fmt/format.h>

#include <filesystem>
#include <tuple>
#include <vector>

#include "cli/namespaces.h"
#include "plan/base/files.h"

namespace shardlab::cli {

Result<Store> open_store(const std::string& directory) {
  if (const auto [run, name] = split_case(directory); !is_there(directory) && !name.empty())
    return Error{ExitCode::kUsage,
                 fmt::format("{} is a case of a run, and a whole run is asked for", directory),
                 fmt::format("name {}; `shardlab explain {}` speaks of the case", run, directory),
                 {}};
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

std::string case_folder(const std::string& directory, const CaseOutcome& outcome) { return directory + "/" + outcome.case_id; }

namespace {

/// A run where one of its cases is asked for.
Error names_no_case(const std::string& directory) {
  constexpr size_t kListed = 20;
  const auto store = open_store(directory);
  if (!store.ok()) return store.error();
  size_t cases = 0;
  std::string names;
  store->for_each([&](const CaseOutcome& outcome) {
    if (++cases <= kListed)
      names += fmt::format("\n  {}/{}", directory, outcome.config.name.empty() ? outcome.case_id : outcome.config.name);
  });
  if (cases > kListed) names += fmt::format("\n  and {} more", cases - kListed);
  return Error{ExitCode::kUsage,
               fmt::format("{} is a run of {} {}, and this is about one case", directory, cases, cases == 1 ? "case" : "cases"),
               "name it:" + names,
               {}};
}

}  // namespace

Result<std::string> case_file(const std::string& where) {
  if (std::filesystem::is_regular_file(where)) return where;
  auto [directory, name] = split_case(where);
  std::string wanted = "case.yaml";
  if (name.empty() && is_there(std::filesystem::path(directory) / "results.sqlite")) return names_no_case(directory);
  if (name.empty()) {  // RUN/CASE/FILE, where CASE is a name and the folder is called by the id
    const std::filesystem::path path = std::filesystem::path(where).lexically_normal();
    if (!path.has_parent_path() || !path.has_filename()) return where;
    std::tie(directory, name) = split_case(path.parent_path().string());
    if (name.empty()) return where;
    wanted = path.filename().string();
  }
  const auto store = open_store(directory);
  if (!store.ok()) return store.error();
  NamedCases<CaseOutcome> named(name);
  store->for_each([&](CaseOutcome outcome) {
    const std::string id = outcome.case_id, its_name = outcome.config.name;
    named.offer(id, its_name, std::move(outcome));
  });
  const std::vector<CaseOutcome>& found = named.found();
  if (found.empty())
    return Error{ExitCode::kUsage,
                 fmt::format("{} holds no case `{}`", directory, name),
                 fmt::format("`shardlab report {}` lists its cases", directory),
                 {}};
  if (found.size() > 1) {
    std::string ids;
    for (const CaseOutcome& c : found) ids += fmt::format("\n  {}  {}", c.case_id, c.config.name);
    return Error{ExitCode::kUsage, fmt::format("`{}` names {} cases", name, found.size()), "take one by its id:" + ids, {}};
  }
  std::string file = case_folder(directory, found.front()) + "/" + wanted;
  if (!is_there(file) && wanted != "case.yaml")
    return Error{ExitCode::kUsage,
                 fmt::format("`{}` of {} left no file {}", name, directory, wanted),
                 fmt::format("its folder is {}", case_folder(directory, found.front())),
                 {}};
  if (!is_there(file))
    return Error{
        ExitCode::kUsage,
        fmt::format("`{}` of {} left no case file", name, directory),
        "cases that were only estimated have none: of a sweep name the sweep file, with --case NAME; of a search its best.yaml",
        {}};
  return file;
}

}  // namespace shardlab::cli
