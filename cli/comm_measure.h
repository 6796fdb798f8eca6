// Collectives measured on a transport as nccl-tests measures them: by size, over iterations, with a check of every element.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cli/namespaces.h"
#include "plan/base/dtype.h"
#include "plan/base/result.h"
#include "plan/case.h"
#include "plan/op.h"
#include "runtime/control.h"

namespace shardlab::cli {

struct CommOptions {
  TransportKind transport = TransportKind::kThreads;
  int ranks = 2;
  std::vector<CollectiveKind> kinds;
  DType dtype = DType::f32;
  ReduceOp reduce = ReduceOp::kSum;
  AlgorithmChoice algorithm = AlgorithmChoice::kAuto;
  int per_node = 1;  ///< ranks of a node, of the hierarchical algorithm
  int64_t min_bytes = 1 << 10, max_bytes = 16 << 20;
  double factor = 4;  ///< from one size to the next
  int warmup = 2, iterations = 10;
  bool check = true;
  double timeout_s = 60;  ///< of any one wait
};

/// Seconds of a call, the mean over iterations and ranks, and how many elements were wrong afterwards, over all ranks.
struct CommTime {
  double seconds = 0;
  std::optional<int64_t> wrong;  ///< none: not checked
};

/// One line of a measurement. `bytes` is the size that nccl-tests states: of the whole, gathered buffer.
struct CommRow {
  CollectiveKind kind = CollectiveKind::kAllReduce;
  Algorithm algorithm = Algorithm::kRing;
  int64_t bytes = 0, elements = 0;
  std::optional<CommTime> apart, in_place;  ///< result apart from the operand; none: there is no such call
};

/// algbw = bytes / seconds, bytes/s.
double algbw(int64_t bytes, double seconds);
/// busbw = algbw times 2 (n - 1) / n for an all_reduce, (n - 1) / n for a reduce_scatter, all_gather and all_to_all, 1 for a broadcast:
/// what each rank's link carries. Source: nccl-tests, doc/PERFORMANCE.md.
double busbw(CollectiveKind kind, int ranks, int64_t bytes, double seconds);

/// Measures every kind and size. `control`: the processes that the ranks are shared out to, in order; all get the same rows. Refuses
/// ranks that cannot be shared out, and what the transport cannot do. Throws WorldError where a process is lost.
Result<std::vector<CommRow>> measure_comm(const CommOptions& options, Control* control);

}  // namespace shardlab::cli
