// Tables of rotations: buffers of a role that its rotary ops read, one for each base.
#pragma once

#include <fmt/format.h>

#include <optional>
#include <string>
#include <variant>

#include "plan/op.h"

namespace shardlab {

/// Base of the rotations that an op makes, of Rope and LatentHeads.
inline std::optional<float> rope_base(const Op& op) {
  if (const Rope* rope = std::get_if<Rope>(&op.work)) return rope->theta;
  if (const LatentHeads* latent = std::get_if<LatentHeads>(&op.work)) return latent->theta;
  return std::nullopt;
}

inline constexpr const char* kRopeTable = "rope.table";

/// The table of a role whose ops have several bases: "rope.table.500000". Of one base it is `kRopeTable`.
inline std::string rope_table_of(float base) { return fmt::format("{}.{}", kRopeTable, base); }

}  // namespace shardlab
