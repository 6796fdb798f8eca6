// Machine files as text.
#pragma once

#include <string>

#include "plan/machine.h"

namespace shardlab::simulator {

/// YAML that sweeps/ reads back: id, local, cores, devices_per_node, nodes, device, inter_bandwidth, calibration with one point a
/// line. Doubles are written so that reading gives the same value.
std::string to_yaml(const Machine& machine);

}  // namespace shardlab::simulator
