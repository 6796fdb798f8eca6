#include "runtime/packed_rows.h"

#include <algorithm>
#include <string_view>

#include "plan/base/check.h"

namespace shardlab::runtime {

namespace {

std::vector<RowRun> runs_of(const CollectiveCall& call, const int32_t* counts, int64_t room, int size, int rank,
                            std::string_view side) {
  std::vector<RowRun> all(static_cast<size_t>(size));
  const int64_t end = room * call.row_bytes;
  int64_t begin = 0;
  for (int peer = 0; peer < size; ++peer) {
    int64_t rows = 0;
    for (int64_t i = 0; i < call.counts; ++i) rows += counts[peer * call.counts + i];
    const int64_t bytes = rows * call.row_bytes;
    SHARDLAB_CHECK(bytes <= end, "rank {} has {} bytes of rows {} rank {} of the group and room for {}", rank, bytes, side, peer,
                   end);
    all[static_cast<size_t>(peer)] = {std::min(begin, end - bytes), bytes};
    begin += bytes;
  }
  return all;
}

}  // namespace

std::vector<RowRun> rows_sent(const CollectiveCall& call, int size, int rank) {
  return runs_of(call, call.sent, call.source_room, size, rank, "for");
}

std::vector<RowRun> rows_received(const CollectiveCall& call, int size, int rank) {
  return runs_of(call, call.received, call.room, size, rank, "from");
}

int64_t bytes_to_others(const std::vector<RowRun>& sent, int index) {
  int64_t bytes = 0;
  for (size_t peer = 0; peer < sent.size(); ++peer)
    if (static_cast<int>(peer) != index) bytes += sent[peer].bytes;
  return bytes;
}

}  // namespace shardlab::runtime
