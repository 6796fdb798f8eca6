// Fits the constants of DeviceModel and Fabric to simulator/published/kernels and prints them as lines of a machine file.
//
//   fit_constants DEVICE_OR_MACHINE NAME...      e.g. fit_constants a100-sxm4-80gb matmul.bf16.rate matmul.ramp_k
//   fit_constants [--source SOURCE] [--above SECONDS] DEVICE_OR_MACHINE NAME...   rows of one source only, rows that take longer
//   only
//
// A coordinate search in the logarithms of the named constants, from their values in the shipped machine file; the others stay. The
// loss is the mean of |log(predicted / measured)|, each row counting for at most log 2, so that rows of another regime do not pull.
// The name `burst` fits, beside the constants, by how much short runs are faster: it is printed and belongs to no machine.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "sweeps/machines.h"
#include "tests/device_model/samples.h"
#include "tests/namespaces.h"

using namespace shardlab;
using namespace shardlab::testing;

namespace {

struct Problem {
  Machine machine;
  std::vector<KernelSample> kernels;
  std::vector<CollectiveSample> collectives;
  double harness_s = 0;
};

double cost(double predicted, double measured) { return std::min(std::abs(std::log(predicted / measured)), std::log(2.0)); }

double loss(const Problem& p) {
  double sum = 0;
  if (!p.kernels.empty()) {
    const auto model = DeviceModel::of(p.machine.device);
    if (!model.ok()) return HUGE_VAL;
    for (const KernelSample& s : p.kernels) sum += cost(predicted(*model, s) + p.harness_s, s.seconds);
  }
  if (!p.collectives.empty()) {
    const auto fabric = Fabric::of(p.machine);
    if (!fabric.ok()) return HUGE_VAL;
    for (const CollectiveSample& s : p.collectives) sum += cost(predicted(*fabric, s), s.seconds);
  }
  return sum / static_cast<double>(p.kernels.size() + p.collectives.size());
}

double& value_of(Problem& p, const std::string& name) {
  if (name == "harness_s") return p.harness_s;
  if (name.starts_with("fabric.")) return p.machine.fabric[name.substr(7)];
  return p.machine.device.constants[name];
}

void fit(Problem& p, const std::vector<std::string>& names) {
  double best = loss(p);
  for (double step = 0.3; step > 0.002; step /= 2)
    for (bool moved = true; moved;) {
      moved = false;
      for (const std::string& name : names)
        for (const double factor : {std::exp(step), std::exp(-step)}) {
          double& x = value_of(p, name);
          const double before = x;
          x *= factor;
          if (name.ends_with("quantisation") || name == "matmul.sustained" || name == "matmul.small_tile" ||
              name == "attention.causal" || name == "attention.head_64")
            x = std::min(x, 1.0);
          if (const double now = loss(p); now < best * (1 - 1e-5)) {
            best = now;
            moved = true;
          } else {
            x = before;
          }
        }
    }
  fmt::print("# {} rows, loss {:.4f}\n", p.kernels.size() + p.collectives.size(), best);
  for (const std::string& name : names) fmt::print("{}: {:.4g}\n", name, value_of(p, name));
}

/// Whether a constant of this name has anything to do with a row.
bool concerns(const std::string& name, const KernelSample& s) {
  const char* const table[] = {"matmul", "attention", "memory"};
  return name.starts_with(table[static_cast<int>(s.table)]) ||
         (name.starts_with("cache") && s.table == KernelSample::Table::kMemory);
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> words(argv + 1, argv + argc);
  std::string source;
  double above_s = 0;
  while (words.size() > 2 && words[0].starts_with("--")) {
    if (words[0] == "--above")
      above_s = std::stod(words[1]);
    else
      source = words[1];
    words.erase(words.begin(), words.begin() + 2);
  }
  if (words.size() < 2) {
    fmt::print(stderr, "usage: fit_constants [--source SOURCE] [--above SECONDS] DEVICE_OR_MACHINE NAME...\n");
    return 2;
  }
  Problem p;
  const auto machine = sample_machine(words[0]);
  if (!machine.ok()) {
    fmt::print(stderr, "{}\n", to_string(machine.error()));
    return 2;
  }
  p.machine = *machine;
  const std::vector<std::string> names(words.begin() + 1, words.end());
  const bool fabric = names[0].starts_with("fabric.");
  for (const std::string& name : names) {
    if (name == "harness_s") p.harness_s = 3e-5;
    if (name == "harness_s") continue;
    double& x = value_of(p, name);
    if (x > 0) continue;
    if (name.starts_with("fabric.")) {
      fmt::print(stderr, "give `{}` a first value in the machine file\n", name);
      return 2;
    }
    for (const DeviceConstant& c : device_constants())
      if (c.name == name) x = DeviceConstants{}.*(c.value);
  }
  const auto wanted = [&](const auto& s) { return (source.empty() || s.source == source) && s.seconds >= above_s; };
  if (fabric) {
    for (const CollectiveSample& s : collective_samples())
      if (s.machine == words[0] && wanted(s)) p.collectives.push_back(s);
  } else {
    for (const KernelSample& s : kernel_samples())
      if (s.device == words[0] && wanted(s) &&
          std::any_of(names.begin(), names.end(), [&](const std::string& name) { return concerns(name, s); }))
        p.kernels.push_back(s);
  }
  if (p.kernels.empty() && p.collectives.empty()) {
    fmt::print(stderr, "no rows for {}\n", words[0]);
    return 3;
  }
  fit(p, names);
  return 0;
}
