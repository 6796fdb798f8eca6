// Whether two machines are one, asked of every case of a sweep: maps of constants are compared, nothing is written out.
#pragma once

#include <algorithm>

#include "plan/machine.h"

namespace shardlab {

inline bool same(const Device& a, const Device& b) {
  return a.id == b.id && a.architecture == b.architecture && a.memory_bytes == b.memory_bytes &&
         a.memory_bytes_per_s == b.memory_bytes_per_s && a.peak_flops == b.peak_flops && a.link_bytes_per_s == b.link_bytes_per_s &&
         a.power_w == b.power_w && a.constants == b.constants && a.provenance == b.provenance;
}

/// Whether two machines are equal in every constant; calibrations are compared by pointer.
inline bool same(const Machine& a, const Machine& b) {
  return a.id == b.id && a.devices_per_node == b.devices_per_node && a.nodes == b.nodes && a.local == b.local &&
         a.cores == b.cores && a.inter_bytes_per_s == b.inter_bytes_per_s && a.calibration == b.calibration &&
         a.fabric == b.fabric && same(a.device, b.device) && a.kinds.size() == b.kinds.size() &&
         std::equal(a.kinds.begin(), a.kinds.end(), b.kinds.begin(), [](const Machine& x, const Machine& y) { return same(x, y); });
}

}  // namespace shardlab
