#include "simulator/interpreter/datasheet_rates.h"

#include <algorithm>
#include <vector>

#include "plan/base/check.h"
#include "simulator/interpreter/device_model.h"
#include "simulator/interpreter/fabric.h"

namespace shardlab::simulator {
namespace {

/// The model of a machine that `cost_model_for` has let pass.
template <class T>
T must(Result<T> model) {
  SHARDLAB_CHECK(model.ok(), "{}", to_string(model.error()));
  return std::move(model).value();
}

}  // namespace

struct DatasheetRates::Models {
  DeviceModel device;
  Fabric fabric;
};

double dense_peak(const Device& device, Precision precision) {
  bool wide_enough = false;
  for (const char* name : {"fp4", "fp8", "bf16", "fp16", "tf32", "fp32"}) {
    wide_enough = wide_enough || name_of(precision) == name;
    const auto peak = device.peak_flops.find(name);
    if (wide_enough && peak != device.peak_flops.end()) return peak->second;
  }
  return 0;
}

DatasheetRates::DatasheetRates(const Machine& machine, Precision precision, const Efficiency& efficiency)
    : efficiency_(efficiency),
      models_(std::make_shared<const Models>(Models{must(DeviceModel::of(machine.device)), must(Fabric::of(machine))})),
      memory_bytes_per_s_(machine.device.memory_bytes_per_s * efficiency.memory),
      link_bytes_per_s_(machine.device.link_bytes_per_s * efficiency.link),
      inter_bytes_per_s_(machine.inter_bytes_per_s * efficiency.network),
      devices_per_node_(std::max(1, machine.devices_per_node)),
      peak_(dense_peak(machine.device, precision)),
      wide_peak_(peak_) {
  SHARDLAB_CHECK(peak_ > 0 && machine.device.memory_bytes_per_s > 0, "machine `{}` has no peak or bandwidth for {}", machine.id,
                 name_of(precision));
  // 8 bits are for products of 8-bit factors, the rest computes in 16 or more.
  const auto fp8 = machine.device.peak_flops.find("fp8"), bf16 = machine.device.peak_flops.find("bf16");
  if (fp8 != machine.device.peak_flops.end() && bf16 != machine.device.peak_flops.end() && peak_ == fp8->second)
    wide_peak_ = std::min(peak_, bf16->second);
}

double DatasheetRates::peak_of(const Kernel& k) const { return k.narrow ? peak_ : wide_peak_; }

double DatasheetRates::memory_seconds(double bytes) const { return time_at(bytes, memory_bytes_per_s_); }

double DatasheetRates::host_copy_seconds(double bytes, bool to_device) const {
  return models_->device.host_copy_seconds(bytes, to_device ? HostCopy::kToDevice : HostCopy::kToHost);
}

double DatasheetRates::nvme_seconds(double bytes, bool write) const {
  return models_->device.nvme_seconds(bytes, write, devices_per_node_);
}

double DatasheetRates::kernel_seconds(const Kernel& k) const {
  const double reached = efficiency_.matmul * (k.product ? k.flops / (k.flops + efficiency_.ramp_flops) : 1.0);
  return std::max(time_at(k.flops, peak_of(k) * reached), memory_seconds(k.bytes));
}

Demand DatasheetRates::kernel_demand(const Kernel& k) const {
  Demand d;
  d.of(Resource::kUnits) = time_at(k.flops, peak_of(k) * efficiency_.matmul);
  d.of(Resource::kMemory) = memory_seconds(k.bytes);
  return d;
}

DatasheetRates::Way DatasheetRates::way_between(std::span<const int> ranks) const {
  std::vector<int> nodes;
  nodes.reserve(ranks.size());
  for (const int rank : ranks) nodes.push_back(rank / devices_per_node_);
  std::ranges::sort(nodes);
  Way way{.nodes = 0, .fewest_on_a_node = static_cast<int>(ranks.size()), .link = link_bytes_per_s_, .inter = inter_bytes_per_s_};
  for (size_t first = 0, last = 0; first < nodes.size(); first = last, ++way.nodes) {
    while (last < nodes.size() && nodes[last] == nodes[first]) ++last;
    way.fewest_on_a_node = std::min(way.fewest_on_a_node, static_cast<int>(last - first));
  }
  return way;
}

double DatasheetRates::collective_seconds(double steps, double sent, const Way& way) const {
  const StepRates rates = step_rates(efficiency_, way);
  return steps * rates.latency_s + time_at(sent, rates.bytes_per_s);
}

double DatasheetRates::in_turn_seconds(const StepsTaken& turn, const Way& way) const {
  if (!turn.leveled || !way.network()) return collective_seconds(turn.steps, turn.bytes, way);
  return (turn.steps - turn.steps_across) * efficiency_.step_latency_s + time_at(turn.bytes - turn.bytes_across, way.link) +
         turn.steps_across * efficiency_.network_latency_s + time_at(turn.bytes_across, way.inter);
}

Demand DatasheetRates::in_turn_demand(CollectiveUse use, const StepsTaken& turn, const Way& way) const {
  Demand d = collective_demand(use, turn.bytes, way);
  if (!turn.leveled || !way.network()) return d;
  d.of(Resource::kLinkOut) = d.of(Resource::kLinkIn) = time_at(turn.bytes - turn.bytes_across, way.link);
  d.of(Resource::kNetworkOut) = d.of(Resource::kNetworkIn) = time_at(turn.bytes_across, way.inter);
  return d;
}

/// Of the k members on a node each has a ring of its own that leaves by its rail: it sends one part in k of its bytes there.
Demand DatasheetRates::collective_demand(CollectiveUse use, double sent, const Way& way) const {
  Demand d;
  const double remote = way.network() ? 1.0 / way.fewest_on_a_node : 0;
  d.of(Resource::kLinkOut) = d.of(Resource::kLinkIn) = time_at(sent * (1 - remote), way.link);
  d.of(Resource::kNetworkOut) = d.of(Resource::kNetworkIn) = time_at(sent * remote, way.inter);
  d.of(Resource::kMemory) = memory_seconds(models_->fabric.constants().memory_traffic * sent);
  const Group group{way.fewest_on_a_node, way.nodes, way.network() ? std::max(1, devices_per_node_ / way.fewest_on_a_node) : 1};
  d.held_units = models_->device.held_beside(models_->fabric.contention(use, group).taken_sms);
  return d;
}

double DatasheetRates::message_seconds(double bytes, const Way& way) const {
  const double latency = way.network() ? efficiency_.network_latency_s : efficiency_.step_latency_s;
  return latency + time_at(bytes, way.network() ? way.inter : way.link);
}

Demand DatasheetRates::message_demand(double bytes, const Way& way, bool sends) const {
  Demand d;
  const Resource out = way.network() ? Resource::kNetworkOut : Resource::kLinkOut;
  const Resource in = way.network() ? Resource::kNetworkIn : Resource::kLinkIn;
  d.of(sends ? out : in) = time_at(bytes, way.network() ? way.inter : way.link);
  d.of(Resource::kMemory) = memory_seconds(bytes);
  return d;
}

CollectiveUse use_of(CollectiveKind kind) {
  switch (kind) {
    case CollectiveKind::kAllReduce: return CollectiveUse::kAllReduce;
    case CollectiveKind::kReduceScatter: return CollectiveUse::kReduceScatter;
    case CollectiveKind::kAllGather: return CollectiveUse::kAllGather;
    case CollectiveKind::kBroadcast: return CollectiveUse::kBroadcast;
    case CollectiveKind::kAllToAll: return CollectiveUse::kAllToAll;
  }
  return CollectiveUse::kAllReduce;
}

}  // namespace shardlab::simulator
