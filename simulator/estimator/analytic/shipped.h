// The profiles of simulator/profiles, compiled in (simulator/CMakeLists.txt writes the table).
#pragma once

#include <span>
#include <string_view>

namespace shardlab::simulator::analytic {

struct ShippedProfile {
  std::string_view name;  ///< of the file, without .yaml
  std::string_view yaml;
};

std::span<const ShippedProfile> shipped_profiles();  ///< sorted by name

}  // namespace shardlab::simulator::analytic
