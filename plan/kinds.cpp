#include "plan/kinds.h"

#include <fmt/format.h>

#include <algorithm>

#include "plan/base/check.h"
#include "plan/pipeline_case.h"
#include "plan/same_machine.h"

namespace shardlab {

void join_kinds(Machine& machine) {
  SHARDLAB_CHECK(machine.is_mixed(), "machine `{}` has no kinds", machine.id);
  const Device& first = machine.kinds.front().device;
  Device least;
  least.memory_bytes = first.memory_bytes;
  least.memory_bytes_per_s = first.memory_bytes_per_s, least.link_bytes_per_s = first.link_bytes_per_s;
  least.power_w = first.power_w, least.peak_flops = first.peak_flops;
  machine.nodes = 0, machine.devices_per_node = machine.kinds.front().devices_per_node;
  for (const Machine& kind : machine.kinds) {
    const Device& d = kind.device;
    machine.nodes += kind.nodes;
    least.id += (least.id.empty() ? "" : " + ") + d.id;
    least.memory_bytes = std::min(least.memory_bytes, d.memory_bytes);
    least.memory_bytes_per_s = std::min(least.memory_bytes_per_s, d.memory_bytes_per_s);
    least.link_bytes_per_s = std::min(least.link_bytes_per_s, d.link_bytes_per_s);
    least.power_w = std::min(least.power_w, d.power_w);
    ByName<double> both;
    for (const auto& [precision, flops] : least.peak_flops)
      if (const auto found = d.peak_flops.find(precision); found != d.peak_flops.end())
        both[precision] = std::min(flops, found->second);
    least.peak_flops = std::move(both);
  }
  least.provenance = machine.device.provenance;  // of the links between kinds
  machine.device = std::move(least);
}

KindRange kinds_of_ranks(const Machine& machine, int first, int last) {
  SHARDLAB_CHECK(machine.is_mixed(), "machine `{}` has no kinds", machine.id);
  const auto kind_of = [&](int rank) {
    int node = rank / std::max(1, machine.devices_per_node), kind = 0;
    while (kind + 1 < static_cast<int>(machine.kinds.size()) && node >= machine.kinds[static_cast<size_t>(kind)].nodes)
      node -= machine.kinds[static_cast<size_t>(kind++)].nodes;
    return kind;
  };
  return {kind_of(first), kind_of(last)};
}

namespace {

KindRange kinds_of_part(const Machine& machine, int ranks, int stages, int stage) {
  const int each = ranks / std::max(1, stages);
  return kinds_of_ranks(machine, stage * each, (stage + 1) * each - 1);
}

}  // namespace

KindRange kinds_of_stage(const Machine& machine, const Mesh& mesh, int stage) {
  const auto axis = mesh.find(kPipelineAxis);
  SHARDLAB_CHECK(axis.value_or(0) == 0 || mesh.size(kPipelineAxis) == 1, "the pipeline axis of the mesh is number {}", *axis);
  return kinds_of_part(machine, mesh.world_size(), mesh.size(kPipelineAxis), stage);
}

KindRange kinds_of_stage(const Case& c, int stage) { return kinds_of_part(c.machine, c.layout.world_size(), c.layout.pp, stage); }

std::string device_of_stage(const Case& c, int stage) {
  if (!c.machine.is_mixed()) return c.machine.device.id;
  const KindRange kinds = kinds_of_stage(c, stage);
  std::string text;
  for (int kind = kinds.first; kind <= kinds.last; ++kind)
    text += (text.empty() ? "" : " + ") + c.machine.kinds[static_cast<size_t>(kind)].device.id;
  return text;
}

int64_t memory_of_stage(const Case& c, int stage) {
  if (!c.machine.is_mixed()) return memory_per_rank(c);
  const KindRange kinds = kinds_of_stage(c, stage);
  int64_t least = c.machine.kinds[static_cast<size_t>(kinds.first)].device.memory_bytes;
  for (int kind = kinds.first; kind <= kinds.last; ++kind)
    least = std::min(least, c.machine.kinds[static_cast<size_t>(kind)].device.memory_bytes);
  return least;
}

Result<void> check_kinds(const Case& c) {
  const Machine& m = c.machine;
  if (!m.is_mixed()) return {};
  Machine joined = m;
  join_kinds(joined);
  if (!same(joined, m))
    return refusal(
        fmt::format("machine.nodes, machine.devices_per_node or a key of machine.device is set for {}, whose kinds say them", m.id),
        "change the kinds in the machine's file: each has nodes and a device of its own");
  if (c.layout.recompute_options.budget_bytes > 0)
    return refusal(
        fmt::format("recompute within a budget on {}: treatments of layers are chosen by the costs of one kind of device", m.id),
        "set recompute to none, selective or full, or write what each layer makes again");
  if (c.layout.stage_layers == kMeasured)
    return refusal(fmt::format("stage_layers=measured on {}: layers were timed on one kind of device", m.id),
                   "set stage_layers: balanced, which deals layers by the predicted time and the memory of each stage's device");
  return {};
}

}  // namespace shardlab
