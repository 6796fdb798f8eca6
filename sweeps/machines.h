// Machines by name or from a machine file (datasheet or calibrated).
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "plan/base/result.h"
#include "plan/machine.h"
#include "sweeps/yaml.h"

namespace shardlab::sweeps {

/// "datasheet", "measured", "fitted", "transferred": as machine files write it.
std::string_view name_of(Provenance p);

/// Names of the machines that ship with the program (sweeps/machines/*.yaml, compiled in), sorted.
std::vector<std::string> list_machines();

/// The shipped machine that is meant by a name as people write it: "H100", "dgx-h100", "4090" (sweeps/names.h).
Result<std::string> machine_name(const std::string& said);

/// The text of a shipped machine, with the source of every constant; for `machine show`.
Result<std::string> machine_text(const std::string& name);

/// A preset by name, or the machine file at a path (anything with a '/' or ending in ".yaml" or ".yml"). Keys:
///   id local cores devices_per_node nodes inter_bandwidth
///   device: {preset id architecture memory memory_bandwidth peak_flops: {fp32: ..} link_bandwidth power_w constants: {NAME: ..}}
///   fabric: {NAME: ..}
///   price: {usd_per_hour date source}: of one device; not taken over with `device.preset`
///   kinds: [{machine nodes} or a machine in full, ...] of a mixed machine: ranks fill the nodes of the first kind, then those of the next;
///          `inter_bandwidth` is then between nodes of unlike kinds, and `device`, `nodes` and `devices_per_node` are the kinds'
///   calibration: {id date command processor kernel_variant op_overhead_s wake_latency_s handover_s turn_s
///                 launch_ahead points: [{kernel shape concurrency seconds spread repeats}]}
/// `device.preset` takes the device of a shipped machine; the keys beside it replace its own. Names of constants: see
/// plan/machine.h. A constant is a number or {value, provenance, source, note}; `name` and `notes` are for readers. Bytes, bytes/s,
/// flop/s, watts, seconds.
Result<Machine> load_machine(const std::string& name_or_path);

/// What a device is rented for, as somebody lists it.
struct Price {
  double usd_per_hour = 0;   ///< of one device; 0: not known
  std::string date, source;  ///< when and where that was read: prices move
};
/// The `price` of a preset or machine file, beside the machine because no plan and no prediction knows of money; 0 where it has
/// none.
Result<Price> load_price(const std::string& name_or_path);

/// The same from text; `file` stands in messages.
Result<Machine> parse_machine(std::string_view yaml, const std::string& file);

/// The same from a map that was read already; problems are added, and the machine is what could be read.
Machine read_machine(const YamlNode& node, Problems& problems);

}  // namespace shardlab::sweeps
