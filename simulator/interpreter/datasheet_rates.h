// Seconds of work on a machine known by its data sheet, in plain numbers: what DatasheetCostModel asks for the ops of a plan.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "plan/case.h"
#include "plan/machine.h"
#include "plan/op.h"
#include "simulator/interpreter/efficiency.h"
#include "simulator/interpreter/nccl_model.h"
#include "simulator/interpreter/resources.h"

namespace shardlab::simulator {

/// A plan's collective in the words of the network's models.
CollectiveUse use_of(CollectiveKind kind);

/// Steps that follow one another and the bytes that a rank moves in them; `leveled`: those between nodes are known apart.
struct StepsTaken {
  double steps = 1, bytes = 0;
  double steps_across = 0, bytes_across = 0;
  bool leveled = false;
};

/// Formula and sources: DatasheetCostModel (simulator/interpreter/cost_model.h).
class DatasheetRates {
 public:
  /// The machine must be one that `cost_model_for` does not refuse. `precision` says which peak is used; a machine
  /// without it has its largest slower one.
  DatasheetRates(const Machine& machine, Precision precision, const Efficiency& efficiency = {});

  /// What a kernel on the device does.
  struct Kernel {
    double flops = 0, bytes = 0;
    bool product = false;  ///< a matmul or an attention, which small sizes slow
    bool narrow = false;   ///< of factors of 8 bits, which alone reach their peak
  };
  double kernel_seconds(const Kernel& k) const;
  /// Of multiprocessors and memory.
  Demand kernel_demand(const Kernel& k) const;

  using Way = simulator::Way;
  Way way_between(std::span<const int> ranks) const;

  /// A collective of `steps` in which a rank sends `sent` bytes.
  double collective_seconds(double steps, double sent, const Way& way) const;
  Demand collective_demand(CollectiveUse use, double sent, const Way& way) const;
  /// A collective whose steps follow one another at each one's own links: of `turn`, `across` are between nodes, where a rank has its
  /// own rail, and the rest within one.
  double in_turn_seconds(const StepsTaken& turn, const Way& way) const;
  Demand in_turn_demand(CollectiveUse use, const StepsTaken& turn, const Way& way) const;
  double message_seconds(double bytes, const Way& way) const;
  /// Of the rank that sends it, or of the one that receives it.
  Demand message_demand(double bytes, const Way& way, bool sends) const;

  /// Seconds for which the memory of the device moves `bytes`.
  double memory_seconds(double bytes) const;
  /// One copy between host memory and the device.
  double host_copy_seconds(double bytes, bool to_device) const;
  /// While all devices of the node do so.
  double nvme_seconds(double bytes, bool write) const;
  const Efficiency& efficiency() const { return efficiency_; }

 private:
  struct Models;
  double peak_of(const Kernel& k) const;

  Efficiency efficiency_;
  std::shared_ptr<const Models> models_;  ///< of device and fabric, for what is no rate
  double memory_bytes_per_s_ = 0, link_bytes_per_s_ = 0, inter_bytes_per_s_ = 0;
  int devices_per_node_ = 1;
  double peak_ = 0;       ///< of the precision
  double wide_peak_ = 0;  ///< of what is no product of 8-bit factors
};

/// Dense peak of the precision, or of the next wider one that the machine computes in; 0 for none.
double dense_peak(const Device& device, Precision precision);

}  // namespace shardlab::simulator
