// Where the rows of each peer lie in a buffer of packed rows: one home for all transports.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/transport.h"

namespace shardlab::runtime {

/// The rows of one peer, in bytes of the buffer.
struct RowRun {
  int64_t begin = 0, bytes = 0;
};

/// The rows that `rank` sends to each rank of a group of `size`, by group index, in `call.source`. A run that would reach beyond the room lies
/// at its end. `call.sent` is not null.
std::vector<RowRun> rows_sent(const CollectiveCall& call, int size, int rank);
/// The rows that come to `rank` from each rank of the group, in `call.target`.
std::vector<RowRun> rows_received(const CollectiveCall& call, int size, int rank);

/// Bytes of the rows that go to other ranks than group index `index`.
int64_t bytes_to_others(const std::vector<RowRun>& sent, int index);

}  // namespace shardlab::runtime
