#include "tests/validate/support.h"

#include <fmt/format.h>

#include <map>

#include "simulator/estimator/validate/published.h"
#include "sweeps/machines.h"
#include "sweeps/models.h"
#include "tests/test.h"

namespace shardlab::simulator::validation::testing {

using namespace sweeps;
namespace {

Result<Model> model_named(const std::string& name) {
  if (name != "tiny-llama") return Error{ExitCode::kUsage, fmt::format("no model is named `{}`", name), "list them", {}};
  Model m;
  m.name = name, m.family = Family::kLlama;
  m.layers = 8, m.hidden = 256, m.heads = 8, m.kv_heads = 2, m.head_dim = 32, m.ffn = 512, m.vocab = 1000;
  return m;
}

Result<Machine> machine_named(const std::string& name) {
  if (name != "node" && name != "box")
    return Error{ExitCode::kUsage, fmt::format("no machine is named `{}`", name), "list them", {}};
  Machine m;
  m.id = name;
  m.device.memory_bytes = 80'000'000'000;
  m.devices_per_node = name == "node" ? 8 : 1;
  return m;
}

double number_in(const ScoredRow& row, const char* column) {
  const std::string text = row.field(column);
  return text.empty() ? 0 : std::stod(text);
}

}  // namespace

Resolver resolver() { return {model_named, machine_named}; }

Resolver published_resolver() {
  const auto machine = [](const std::string& name) {
    for (const PublishedFile& file : published_machines())
      if (file.name == name) return parse_machine(file.text, name + ".yaml");
    return load_machine(name);
  };
  return {[](const std::string& name) { return load_model(name); }, machine};
}

std::set<std::string> untuned_sets() {
  std::set<std::string> names;
  for (const PublishedFile& file : published_runs())
    if (file.untuned) names.emplace(file.name);
  return names;
}

std::vector<RowTable> published_tables() {
  std::map<std::string, Result<Machine>> machines;
  Resolver resolver = published_resolver();
  resolver.machine = [&machines, load = resolver.machine](const std::string& name) {
    const auto found = machines.find(name);
    return found != machines.end() ? found->second : machines.emplace(name, load(name)).first->second;
  };
  std::vector<RowTable> tables;
  for (const PublishedFile& file : published_runs()) {
    auto table = read_rows(file.text, std::string(file.name) + ".csv", resolver);
    REQUIRE(table.ok());
    tables.push_back(std::move(*table));
  }
  return tables;
}

RowTable table_of(const std::string& header, const std::vector<std::string>& rows, const std::string& name) {
  std::string text = "model,machine,seq_len," + header + "\n";
  for (const std::string& row : rows) text += "tiny-llama,node,128," + row + "\n";
  auto table = read_rows(text, name + ".csv", resolver());
  INFO((table.ok() ? std::string() : to_string(table.error())));
  REQUIRE(table.ok());
  return std::move(*table);
}

std::vector<ScoredRow> predicted(const std::vector<RowTable>& tables) {
  std::vector<ScoredRow> rows = predict_rows(tables, [](const Run&) { return Prediction{}; });
  for (ScoredRow& row : rows) {
    if (!row.prediction.ok()) continue;
    if (row.field("p_step").empty()) {
      row.prediction = Error{ExitCode::kUsage, "not predicted", "", {}};
      continue;
    }
    Prediction p;
    p.step_s = number_in(row, "p_step");
    p.bytes.fill(static_cast<int64_t>(number_in(row, "p_bytes")));
    p.bytes[static_cast<size_t>(MemoryKind::kDevice)] = static_cast<int64_t>(number_in(row, "p_device"));
    p.capacity_bytes = row.row().run->machine.device.memory_bytes;
    row.prediction = p;
  }
  return rows;
}

}  // namespace shardlab::simulator::validation::testing
