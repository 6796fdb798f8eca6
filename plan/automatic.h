// The values that `auto` stands for: where a case leaves a choice to the program, it takes the baseline that practitioners run.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "plan/case.h"
#include "plan/op.h"

namespace shardlab {

/// Gradients reduced together where nobody says: 25 MiB. Source: PyTorch, DistributedDataParallel, bucket_cap_mb.
inline constexpr int64_t kBucketBytes = int64_t{25} << 20;

/// `bucket_bytes` of a case that leaves it out. 0 where no bucket of gradients travels: one data-parallel rank, zero 3 (units
/// travel), diloco (parameters travel one by one), and another framework's profile, which has its own.
inline int64_t automatic_bucket_bytes(const Case& c) {
  const bool travels = c.layout.data_ranks() > 1 && c.layout.zero < 3 && c.layout.diloco.steps == 0;
  return travels && c.profile == "shardlab" ? kBucketBytes : 0;
}

/// `collective_algorithm: auto` for a collective among `ranks`: halving-doubling for sums and gathers in groups of a power of two
/// above two, else a ring. Both send the same bytes at every size, and halving-doubling has log2 N steps for the ring's N - 1: within a
/// node no size is predicted to be slower by it, and over nodes `choose_collectives` compares. In groups of two they are the same.
/// Source: Thakur, Rabenseifner, Gropp, Optimization of Collective Communication Operations in MPICH (2005).
constexpr Algorithm automatic_algorithm(CollectiveKind kind, int ranks) {
  const bool halves =
      kind == CollectiveKind::kAllReduce || kind == CollectiveKind::kReduceScatter || kind == CollectiveKind::kAllGather;
  return halves && ranks > 2 && std::has_single_bit(static_cast<unsigned>(ranks)) ? Algorithm::kHalvingDoubling : Algorithm::kRing;
}

/// The algorithm that `choice` means for a collective among `ranks`.
constexpr Algorithm algorithm_among(AlgorithmChoice choice, CollectiveKind kind, int ranks) {
  switch (choice) {
    case AlgorithmChoice::kRing: return Algorithm::kRing;
    case AlgorithmChoice::kHalvingDoubling: return Algorithm::kHalvingDoubling;
    case AlgorithmChoice::kDirect: return Algorithm::kDirect;
    case AlgorithmChoice::kTree: return Algorithm::kTree;
    case AlgorithmChoice::kHierarchical: return Algorithm::kHierarchical;
    case AlgorithmChoice::kAuto: break;
  }
  return automatic_algorithm(kind, ranks);
}

/// Ranks of the case on one node: what the machine's nodes have, or of a local machine an equal part of the ranks (`machine.nodes`).
inline int ranks_per_node(const Case& c) {
  if (!c.machine.local) return std::max(1, c.machine.devices_per_node);
  return std::max(1, c.layout.world_size() / std::max(1, c.machine.nodes));
}

/// The algorithm of a collective of the case among `ranks`. In canonical mode all are direct.
inline Algorithm algorithm_of(const Case& c, CollectiveKind kind, int ranks) {
  return c.canonical ? Algorithm::kDirect : algorithm_among(c.layout.collective_algorithm, kind, ranks);
}

}  // namespace shardlab
