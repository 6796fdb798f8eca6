// The profiles of simulator/profiles and the learnt intervals of simulator/published, compiled in (simulator/CMakeLists.txt writes
// the tables).
#pragma once

#include <span>
#include <string_view>

namespace shardlab::simulator::analytic {

struct ShippedProfile {
  std::string_view name;  ///< of the file, without .yaml
  std::string_view yaml;
};

std::span<const ShippedProfile> shipped_profiles();  ///< sorted by name
std::string_view shipped_intervals();                  ///< simulator/published/intervals.csv: doubt.h reads it

}  // namespace shardlab::simulator::analytic
