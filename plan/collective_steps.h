// The steps of each collective algorithm, as pure data: the CPU transport executes them, the simulator costs them.
//
// A buffer of n elements is cut into one part per rank of the group: part i is [n*i/g, n*(i+1)/g) (uneven for n % g != 0).
// Step k of rank r says what it sends, what it receives, and what it does with it. Steps with equal index happen together;
// a rank goes on to the next step once its send and its receive are done.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/op.h"

namespace shardlab {

struct CollectiveStep {
  enum class Action : uint8_t {
    kCopy,        ///< received parts overwrite the own ones
    kReduce,      ///< received parts are combined into the own ones: own = own + received
    kTreeReduce,  ///< the own part becomes the canonical tree over the parts of ALL ranks in group order (kDirect)
  };
  int send_to = -1;             ///< group index, -1 for none, -2 for every other rank (kDirect)
  int receive_from = -1;        ///< likewise
  std::vector<int> send_parts;  ///< part numbers sent (to each destination d its own part d when send_to == -2 in a reduce)
  std::vector<int> receive_parts;
  Action action = Action::kCopy;
};

/// Steps of rank `index` in a group of `size`. Empty for groups of one.
///
/// ring: reduce-scatter in size-1 steps, all-gather in size-1 more; rank i ends the first phase with part i.
/// halving-doubling (power-of-two groups): log2(size) steps of halving volume each way.
/// direct: one exchange of all parts, a tree sum; one exchange of results.
/// Bytes each rank sends: reduce-scatter and all-gather n - |own part|-like sums (exactly: `sent_elements`); all-reduce both.
std::vector<CollectiveStep> collective_steps(CollectiveKind kind, Algorithm algorithm, int size, int index, int root = 0);

/// First element of part `part` of a buffer of `elements` cut for `size` ranks.
constexpr int64_t part_begin(int64_t elements, int size, int part) { return elements * part / size; }

/// Elements that rank `index` sends under the algorithm, for a buffer of `elements` (the full, gathered extent):
/// evaluated by summing the steps.
int64_t sent_elements(CollectiveKind kind, Algorithm algorithm, int64_t elements, int size, int index, int root = 0);

}  // namespace shardlab
