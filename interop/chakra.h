// A step as Chakra execution traces (MLCommons), which ASTRA-sim runs: a graph of ops a rank.
#pragma once

#include <string>
#include <vector>

#include "plan/program.h"
#include "plan/trace.h"

namespace shardlab::interop {

/// Ranks that communicate, in group order.
struct ChakraGroup {
  size_t comm = 0;  ///< index into Plan::comms
  std::vector<int> ranks;
};

/// Groups by number, the first of which is 1: of each communicator of the plan, in its order, every group of two ranks or more, in order
/// of its lowest rank.
std::vector<ChakraGroup> chakra_groups(const Plan& plan);

/// {"1": [0, 1], ...}: the file that ASTRA-sim's --comm-group-configuration names.
std::string chakra_groups_json(const std::vector<ChakraGroup>& groups);

/// The graph of `rank`, NAME.RANK.et: a message GlobalMetadata and one Node an op, each behind its length. `groups` are those of
/// the plan. Seconds are those of step `step` in `durations` on the rank `like`: a rank of the same role that the trace has.
///
/// An op is a COMP_NODE with flops ("num_ops") and bytes of its operands ("tensor_size"); a copy between memory spaces a MEM_STORE_NODE
/// or MEM_LOAD_NODE; a collective a COMM_COLL_NODE with the bytes that the rank puts in ("comm_size"; of an all-gather its shard) and its
/// group ("pg_name"); a message a COMM_SEND_NODE or COMM_RECV_NODE, whose "comm_tag" sender and receiver share. A node depends on the op
/// before it on its stream and on those that it waits for; waits of allocations and frees pass to what follows them. Durations
/// are whole microseconds, without the wait for peers: how long communication takes is for the simulator to say.
///
/// Field numbers: schema/protobuf/et_def.proto of github.com/mlcommons/chakra at 6dc63e1; types of attributes as its feeder reads them.
std::string to_chakra(const Plan& plan, const Program& program, const std::vector<ChakraGroup>& groups, const Trace& durations,
                      int rank, int like, int step);

}  // namespace shardlab::interop
