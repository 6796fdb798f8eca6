// The published kernel and collective tables, what DeviceModel and Fabric predict for their rows, and the residuals.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "plan/base/result.h"
#include "plan/machine.h"
#include "simulator/interpreter/device_model.h"
#include "simulator/interpreter/fabric.h"
#include "tests/namespaces.h"

namespace shardlab::testing {

/// One measured kernel. What of it is used depends on `table`.
struct KernelSample {
  enum class Table : uint8_t { kMatmul, kAttention, kMemory } table = Table::kMatmul;
  std::string device;
  std::string family;  ///< what one residual is printed for
  std::string source;
  bool burst = false;  ///< a run too short for the clock to settle
  Matmul matmul;
  AttentionShape attention;
  double bytes = 0;
  double launches = 1;
  MemoryKernel kind = MemoryKernel::kElementwise;
  double seconds = 0;
};

struct CollectiveSample {
  std::string machine;
  std::string family;
  std::string source;
  bool send = false;  ///< one message, not a collective
  CollectiveUse kind = CollectiveUse::kAllReduce;
  Group group;
  double bytes = 0;
  double seconds = 0;
};

/// One linear forward and backward with 8-bit products, against the same in 16 bits.
struct QuantisedLinearSample {
  std::string device;
  std::string recipe;
  double m = 0, k = 0, n = 0;
  double speedup = 0;
};

/// All rows of simulator/published/kernels.
std::vector<KernelSample> kernel_samples();
std::vector<CollectiveSample> collective_samples();
std::vector<QuantisedLinearSample> quantised_linear_samples();

/// The preset of this name, or the machine of simulator/published/runs/machines.
Result<Machine> sample_machine(const std::string& name);

/// Seconds by the model.
double predicted(const DeviceModel& model, const KernelSample& sample);
double predicted(const Fabric& fabric, const CollectiveSample& sample);

/// Of |predicted / measured - 1|.
struct Residuals {
  int count = 0;
  double median = 0;
  double p90 = 0;
  double bias = 0;  ///< median of predicted / measured - 1
};
Residuals residuals(std::vector<double> ratios);

}  // namespace shardlab::testing
