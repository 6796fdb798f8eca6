// Wire bytes of a plan: what each rank sends, under the named algorithm, uneven parts included, headers not.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "plan/plan.h"

namespace shardlab {

/// Bytes sent in one step by the rank at `c`, by communicator name.
std::map<std::string, int64_t> wire_bytes(const Plan& plan, const Coordinates& c);

/// Bytes that group index `index` of `size` ranks sends in the collective `op` of `segment`; packed rows by an even route.
int64_t sent_bytes(const Segment& segment, const Op& op, int size, int index);

/// Rows that travel as routers choose: as many as an even route has, or none.
enum class PackedRows : uint8_t { kEven, kLeftOut };

/// Wire bytes of one step by communicator name, summed over every rank of the mesh.
std::map<std::string, int64_t> total_wire_bytes(const Plan& plan, PackedRows rows = PackedRows::kEven);

}  // namespace shardlab
