// Wire bytes of a plan: what each rank sends, under the named algorithm, uneven parts included, headers not.
#pragma once

#include <map>
#include <string>

#include "plan/plan.h"

namespace shardlab {

/// Bytes sent in one step by the rank at `c`, by communicator name.
std::map<std::string, int64_t> wire_bytes(const Plan& plan, const Coordinates& c);

/// Wire bytes of one step by communicator name, summed over every rank of the mesh.
std::map<std::string, int64_t> total_wire_bytes(const Plan& plan);

}  // namespace shardlab
