// What a collective by one of shardlab's own algorithms (plan/collective_steps.h) takes, in numbers of which the rates of a machine make
// seconds: steps, bytes, and messages, with what goes between nodes apart.
#pragma once

#include <cstdint>

#include "plan/op.h"

namespace shardlab::simulator {

/// Seconds of each message that a rank sends in a step beyond the first: an exchange with n - 1 peers costs more to begin than one with a
/// neighbour. Source: the least of what fits collectives of NCCL between all ranks, FabricConstants::message_s.
inline constexpr double kMessage_s = 0.5e-6;

/// Of the rank that moves most.
struct OwnSteps {
  double steps = 0;                              ///< that follow one another
  double elements = 0;                           ///< of the whole buffer, that pass the rank's links
  double steps_across = 0, elements_across = 0;  ///< of both, between nodes; where `leveled`
  double messages = 0;                           ///< beyond the first of each step
  /// Each step goes at its own links, between nodes by the rank's own rail. Else all steps go as parallel rings do, one a device of a node,
  /// over the slowest link.
  bool leveled = false;
};

/// A group of `ranks` with `per_node` neighbours on each node, of a buffer of `elements`. Over nodes every algorithm is leveled but the
/// ring, all of whose steps go between nodes for some rank. Halving-doubling and trees go hop by hop (`steps_in_turn`): a step between
/// ranks that are less than a node apart stays within nodes, and each of the others has the rank's own rail for all that it moves in it.
OwnSteps own_steps(CollectiveKind kind, Algorithm algorithm, int64_t elements, int ranks, int per_node, int root = 0);

}  // namespace shardlab::simulator
