#include "tests/device_model/samples.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <sstream>
#include <stdexcept>

#include "sweeps/machines.h"
#include "tests/namespaces.h"
#include "tests/paths.h"

namespace shardlab::testing {

namespace {

using Row = std::map<std::string, std::string>;

std::vector<std::string> split(const std::string& line) {
  std::vector<std::string> cells;
  std::stringstream in(line);
  for (std::string cell; std::getline(in, cell, ',');) cells.push_back(cell);
  return cells;
}

std::vector<Row> rows_of(const std::string& name) {
  std::ifstream in(testing::source_dir() + "/simulator/published/kernels/" + name);
  if (!in) throw std::runtime_error("no table " + name);
  std::string line;
  std::getline(in, line);
  const std::vector<std::string> header = split(line);
  std::vector<Row> rows;
  while (std::getline(in, line)) {
    const std::vector<std::string> cells = split(line);
    Row row;
    for (size_t i = 0; i < header.size(); ++i) row[header[i]] = cells.at(i);
    rows.push_back(std::move(row));
  }
  return rows;
}

template <class T>
T word(const std::string& text, const std::vector<std::string>& words) {
  const auto it = std::find(words.begin(), words.end(), text);
  if (it == words.end()) throw std::runtime_error("unknown word " + text);
  return static_cast<T>(it - words.begin());
}

KernelSample common(const Row& row, KernelSample::Table table) {
  KernelSample s;
  s.table = table;
  s.device = row.at("device");
  s.family = row.at("family");
  s.source = row.at("source");
  s.seconds = std::stod(row.at("seconds"));
  if (const auto it = row.find("regime"); it != row.end()) s.burst = it->second == "burst";
  return s;
}

}  // namespace

std::vector<KernelSample> kernel_samples() {
  std::vector<KernelSample> samples;
  for (const Row& row : rows_of("matmul.csv")) {
    KernelSample s = common(row, KernelSample::Table::kMatmul);
    s.matmul = {.m = std::stod(row.at("m")), .n = std::stod(row.at("n")), .k = std::stod(row.at("k"))};
    s.matmul.batch = std::stod(row.at("batch"));
    s.matmul.precision = precision_named(row.at("precision")).value();
    s.matmul.product = word<Product>(row.at("product"), {"forward", "input", "weight"});
    s.matmul.out_bytes = std::stod(row.at("out_bytes"));
    s.matmul.accumulate = row.at("accumulate") == "1";
    s.matmul.grouped = s.family == "grouped";
    s.family = "matmul " + s.family + " " + row.at("precision") + " " + row.at("product");
    samples.push_back(s);
  }
  for (const Row& row : rows_of("attention.csv")) {
    KernelSample s = common(row, KernelSample::Table::kAttention);
    s.attention = {.batch = std::stod(row.at("batch")), .heads = std::stod(row.at("heads"))};
    s.attention.kv_heads = std::stod(row.at("kv_heads"));
    s.attention.queries = s.attention.keys = std::stod(row.at("queries"));
    s.attention.head_dim = std::stod(row.at("head_dim"));
    s.attention.value_dim = std::stod(row.at("value_dim"));
    s.attention.causal = row.at("causal") == "1";
    s.attention.pass = word<Pass>(row.at("pass"), {"forward", "backward"});
    s.attention.kernel = word<AttentionKernel>(row.at("kernel"), {"fused", "unfused", "flash_2"});
    s.family = "attention " + s.family + " " + row.at("pass");
    samples.push_back(s);
  }
  for (const Row& row : rows_of("memory.csv")) {
    KernelSample s = common(row, KernelSample::Table::kMemory);
    s.bytes = std::stod(row.at("bytes"));
    s.launches = std::stod(row.at("launches"));
    s.kind = word<MemoryKernel>(row.at("kind"), {"elementwise", "norm", "norm_backward", "softmax", "cross_entropy", "embedding",
                                                 "optimizer", "eager", "activation"});
    s.family = "memory " + s.family;
    samples.push_back(s);
  }
  return samples;
}

std::vector<CollectiveSample> collective_samples() {
  std::vector<CollectiveSample> samples;
  for (const Row& row : rows_of("collectives.csv")) {
    CollectiveSample s;
    s.machine = row.at("machine");
    s.family = row.at("kind") + " " + row.at("family");
    s.source = row.at("source");
    s.send = row.at("kind") == "send_recv";
    if (!s.send)
      s.kind =
          word<CollectiveUse>(row.at("kind"), {"all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all"});
    s.group = {std::stoi(row.at("ranks_per_node")), std::stoi(row.at("nodes")), std::stoi(row.at("groups_per_node"))};
    s.bytes = std::stod(row.at("bytes"));
    s.seconds = std::stod(row.at("seconds"));
    samples.push_back(s);
  }
  return samples;
}

std::vector<QuantisedLinearSample> quantised_linear_samples() {
  std::vector<QuantisedLinearSample> samples;
  for (const Row& row : rows_of("quantised_linear.csv"))
    samples.push_back({.device = row.at("device"),
                       .recipe = row.at("recipe"),
                       .m = std::stod(row.at("m")),
                       .k = std::stod(row.at("k")),
                       .n = std::stod(row.at("n")),
                       .speedup = std::stod(row.at("speedup"))});
  return samples;
}

namespace {

/// SimuMax times an attention call of Transformer Engine from the host: the smallest calls take 52 us on B200 and 99 us on A100
/// whatever their shape (fitted with the rates). A training step runs ahead of its device and does not see that.
double harness_seconds(const KernelSample& s) {
  if (s.source != "simumax") return 0;
  return s.device == "b200-hgx-180gb" ? 52e-6 : 99e-6;
}

}  // namespace

Result<Machine> sample_machine(const std::string& name) {
  const std::vector<std::string> presets = list_machines();
  if (std::find(presets.begin(), presets.end(), name) != presets.end()) return load_machine(name);
  return load_machine(testing::source_dir() + "/simulator/published/runs/machines/" + name + ".yaml");
}

double predicted(const DeviceModel& model, const KernelSample& s) {
  switch (s.table) {
    case KernelSample::Table::kMatmul: return model.matmul_seconds(s.matmul, s.burst);
    case KernelSample::Table::kAttention: return model.attention_seconds(s.attention) + harness_seconds(s);
    case KernelSample::Table::kMemory: return model.memory_bound_seconds(s.bytes, s.launches, s.kind);
  }
  return 0;
}

double predicted(const Fabric& fabric, const CollectiveSample& s) {
  if (s.send) return fabric.send_seconds(s.bytes, s.group.nodes > 1);
  return fabric.collective_seconds(s.kind, s.bytes, s.group);
}

Residuals residuals(std::vector<double> ratios) {
  Residuals r;
  r.count = static_cast<int>(ratios.size());
  if (ratios.empty()) return r;
  const auto at = [](std::vector<double> x, double q) {
    std::sort(x.begin(), x.end());
    return x[std::min(x.size() - 1, static_cast<size_t>(q * x.size()))];
  };
  for (double& x : ratios) x -= 1;
  r.bias = at(ratios, 0.5);
  for (double& x : ratios) x = std::abs(x);
  r.median = at(ratios, 0.5);
  r.p90 = at(ratios, 0.9);
  return r;
}

}  // namespace shardlab::testing
