#include "cli/run_tables.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <filesystem>
#include <map>
#include <memory>

#include "cli/common.h"
#include "cli/namespaces.h"
#include "plan/base/files.h"
#include "plan/base/limits.h"
#include "simulator/estimator/validate/published.h"
#include "sweeps/machines.h"
#include "sweeps/models.h"

namespace shardlab::cli {
namespace {

using namespace validation;

/// A path of a row is meant from the folder of its table, and where nothing is there, from the current one.
std::string resolved_path(const std::string& name, const std::string& folder) {
  const std::string beside = (std::filesystem::path(folder) / name).string();
  return is_there(beside) ? beside : name;
}

/// Presets, machines of the published runs, and files.
Resolver resolver_for(const std::string& file) {
  const std::string folder = std::filesystem::path(file).parent_path().string();
  const auto is_path = [](const std::string& name, std::initializer_list<const char*> endings) {
    for (const char* ending : endings)
      if (name.ends_with(ending)) return true;
    return name.find('/') != std::string::npos;
  };
  Resolver resolver;
  resolver.model = [=](const std::string& name) {
    return load_model(is_path(name, {".json"}) ? resolved_path(name, folder) : name);
  };
  resolver.machine = [=](const std::string& name) {
    for (const PublishedFile& machine : published_machines())
      if (machine.name == name) return parse_machine(machine.text, name + ".yaml");
    return load_machine(is_path(name, {".yaml", ".yml"}) ? resolved_path(name, folder) : name);
  };
  return resolver;
}

/// Each distinct name once, however many rows name it.
Resolver remembering(Resolver inner) {
  const auto models = std::make_shared<std::map<std::string, Result<Model>>>();
  const auto machines = std::make_shared<std::map<std::string, Result<Machine>>>();
  Resolver resolver;
  resolver.model = [inner, models](const std::string& name) {
    const auto found = models->find(name);
    return found != models->end() ? found->second : models->emplace(name, inner.model(name)).first->second;
  };
  resolver.machine = [inner, machines](const std::string& name) {
    const auto found = machines->find(name);
    return found != machines->end() ? found->second : machines->emplace(name, inner.machine(name)).first->second;
  };
  return resolver;
}

}  // namespace

Result<std::vector<RowTable>> published_tables() {
  std::vector<RowTable> tables;
  const Resolver resolver = remembering(resolver_for(""));
  for (const PublishedFile& file : published_runs()) {
    auto table = read_rows(file.text, std::string(file.name) + ".csv", resolver);
    if (!table.ok()) return table.error();
    tables.push_back(std::move(*table));
  }
  return tables;
}

Result<std::vector<RowTable>> tables_of(const std::vector<std::string>& files) {
  std::vector<RowTable> tables;
  for (const std::string& file : files) {
    const auto text = read_file_within(file, limits::kRowsBytes);
    if (!text.ok()) return text.error();
    auto table = read_rows(*text, file, remembering(resolver_for(file)));
    if (!table.ok()) return table.error();
    if (const size_t n = table->unread.size(); n > 0)
      fmt::print(stderr, "note: {}: {} not used: {}\n", file, n == 1 ? "1 column is" : fmt::format("{} columns are", n),
                 fmt::join(table->unread, " "));
    tables.push_back(std::move(*table));
  }
  return tables;
}

}  // namespace shardlab::cli
