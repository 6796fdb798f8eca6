// What nccl-tests prints, as text or as the JSON of `-J`; `shardlab comm --format json` writes the same JSON.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "plan/base/result.h"

namespace shardlab::sweeps {

/// One size of one collective. Out of place where the output has it, else in place.
struct NcclTestRow {
  int64_t bytes = 0;
  double seconds = 0;
  double bus_bytes_per_s = 0;
};

struct NcclTest {
  std::string collective;  ///< "all_reduce"
  int ranks = 0, nodes = 0;
  std::vector<NcclTestRow> rows;  ///< by size
};

/// The measurements in a file; text of several runs, one after the other, has several. `file` names it in messages, and names the
/// collective where the output does not (all_reduce_perf.txt), as before version 2.17. Refuses output without results, ranks or name.
Result<std::vector<NcclTest>> parse_nccl_tests(std::string_view text, const std::string& file);

/// A machine file with what was measured of its fabric: `machine` (text of a machine file of `devices_per_node` devices a node) with
/// the constants busbw.* of its fabric replaced. One size is taken, the largest that all have. Tests over all devices of one node
/// correct that level, tests over whole nodes the network; others are refused, as are collectives beside all_reduce, all_gather
/// and reduce_scatter.
Result<std::string> with_measured_fabric(std::string_view machine, int devices_per_node, const std::vector<NcclTest>& tests);

}  // namespace shardlab::sweeps
