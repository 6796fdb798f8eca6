// The steps of each collective algorithm, as pure data: the CPU transport executes them, the simulator costs them.
//
// A buffer of n elements is cut into one part per rank of the group: part i is [n*i/g, n*(i+1)/g) (uneven for n % g != 0).
// Step k of rank r says what the rank sends, what it receives, and what it does with the received parts. Steps with equal index happen together;
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
  std::vector<int> send_parts;  ///< part numbers sent
  /// Part numbers received. When receive_from == -2: part s from each other rank s, or, in a kTreeReduce, the own part from each.
  std::vector<int> receive_parts;
  Action action = Action::kCopy;
  bool scatter = false;  ///< with send_to == -2: each destination d gets part d alone; else each gets all of send_parts
  /// The numbers that received parts have at their sender, if the sender numbers them otherwise: in an all_to_all.
  std::vector<int> their_parts = {};
};

/// Steps of rank `index` in a group of `size`. Empty for groups of one.
///
/// ring: reduce-scatter in size-1 steps, all-gather in size-1 more; rank i ends the first phase with part i.
/// halving-doubling (power-of-two groups): log2(size) steps of halving volume each way.
/// direct: one exchange of all parts, a tree sum; one exchange of results.
/// tree (any group): 2 ceil(log2(size)) steps of an all_reduce, each with the whole buffer. Its all_to_all is the ring's.
/// hierarchical: `per_node` neighbours of the group share a node. Rings within nodes and rings across them, one of each place on a
///   node: per_node + size / per_node - 2 steps for the ring's size - 1, and of n bytes only n (size / per_node - 1) / size across.
///
/// all_reduce, reduce_scatter, broadcast work in place on the whole buffer; a reduce_scatter leaves rank i its part i, the other
/// parts are undefined. all_gather starts with part i in place on rank i. all_to_all has two buffers, both cut in parts: what is
/// sent is read from src, what is received is written to dst, and the own part is copied before the first step; under
/// halving-doubling and hierarchical it works on dst alone, which starts as a copy of src, and a step sends the parts that it
/// receives, so what is sent must be staged (`is_staged`). Step lists of one call have equal lengths on all ranks; a step without peers is a pause.
///
/// Elements that each rank sends: about n - |own part| for a reduce-scatter or an all-gather, both of these for an all-reduce.
/// `sent_elements` has the exact numbers.
std::vector<CollectiveStep> collective_steps(CollectiveKind kind, Algorithm algorithm, int size, int index, int root = 0,
                                             int per_node = 1);

/// Whether the steps send and receive in the same places.
constexpr bool is_staged(CollectiveKind kind, Algorithm algorithm) {
  return kind == CollectiveKind::kAllToAll && (algorithm == Algorithm::kHalvingDoubling || algorithm == Algorithm::kHierarchical);
}

/// How many strips one rank's part of an all_gather's target or a reduce_scatter's source is: the product of the extents before the
/// dim that is cut (b for x[b,s,h] cut along s). 1 where parts are contiguous.
int64_t strips_of(const Mesh& mesh, const Comm& comm, CollectiveKind kind, const Type& source, const Type& target);

/// First element of part `part` of a buffer of `elements` cut for `size` ranks.
constexpr int64_t part_begin(int64_t elements, int size, int part) { return elements * part / size; }

/// Elements that rank `index` sends under the algorithm, for a buffer of `elements` (the full, gathered extent):
/// the sum over the steps.
int64_t sent_elements(CollectiveKind kind, Algorithm algorithm, int64_t elements, int size, int index, int root = 0,
                      int per_node = 1);

/// The serial part of a call: its steps, and the sum over steps of the elements that pass the links of the rank that moves most.
/// `across`: steps and elements of the steps in which some rank's peer is on another node.
struct StepsInTurn {
  int64_t steps = 0, elements = 0;
  int64_t steps_across = 0, elements_across = 0;
};
/// For kHalvingDoubling, kTree and kHierarchical, in which rank 0 moves as much as any rank in every step. `per_node` neighbours of the group
/// share a node.
StepsInTurn steps_in_turn(CollectiveKind kind, Algorithm algorithm, int64_t elements, int size, int per_node = 1);

}  // namespace shardlab
