#include "simulator/interpreter/machine_yaml.h"

#include <fmt/format.h>

#include <iterator>

namespace shardlab::simulator {
namespace {

/// A double-quoted YAML scalar.
std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (c == '\n')
      out += "\\n";
    else
      out += c;
  }
  return out + "\"";
}

}  // namespace

std::string to_yaml(const Machine& machine) {
  std::string out;
  const auto put = [&out]<class... T>(fmt::format_string<T...> format, T&&... values) {
    fmt::format_to(std::back_inserter(out), format, std::forward<T>(values)...);
  };
  put("version: {}\n", kMachineFileVersion);
  put("id: {}\nlocal: {}\ncores: {}\ndevices_per_node: {}\nnodes: {}\n", quoted(machine.id), machine.local, machine.cores,
      machine.devices_per_node, machine.nodes);
  put("device:\n  memory: {}\n  memory_bandwidth: {}\n  peak_flops: {{", machine.device.memory_bytes,
      machine.device.memory_bytes_per_s);
  const char* comma = "";
  for (const auto& [precision, flops] : machine.device.peak_flops) {
    put("{}{}: {}", comma, precision, flops);
    comma = ", ";
  }
  put("}}\n  link_bandwidth: {}\n  power_w: {}\ninter_bandwidth: {}\n", machine.device.link_bytes_per_s, machine.device.power_w,
      machine.inter_bytes_per_s);
  if (!machine.calibration) return out;
  const Calibration& c = *machine.calibration;
  put("calibration:\n  id: {}\n  date: {}\n  command: {}\n  processor: {}\n  kernel_variant: {}\n", quoted(c.id), quoted(c.date),
      quoted(c.command), quoted(c.processor), quoted(c.kernel_variant));
  put("  op_overhead_s: {}\n  wake_latency_s: {}\n  handover_s: {}\n  turn_s: {}\n", c.op_overhead_s, c.wake_latency_s,
      c.handover_s, c.turn_s);
  if (c.unsteadiness > 0) put("  unsteadiness: {}\n", c.unsteadiness);
  if (c.launch_ahead) put("  launch_ahead: true\n");
  put("  points:\n");
  for (const RatePoint& p : c.points)
    put("    - {{kernel: {}, shape: [{}], concurrency: {}, seconds: {}, spread: {}, repeats: {}}}\n", p.kernel,
        fmt::join(p.shape, ", "), p.concurrency, p.seconds, p.spread, p.repeats);
  return out;
}

}  // namespace shardlab::simulator
