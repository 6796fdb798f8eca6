#include "simulator/interpreter/own_collectives.h"

#include "plan/collective_steps.h"

namespace shardlab::simulator {

OwnSteps own_steps(CollectiveKind kind, Algorithm algorithm, int64_t elements, int ranks, int per_node, int root) {
  const bool nodes = per_node < ranks;
  OwnSteps own;
  if (algorithm == Algorithm::kHalvingDoubling || algorithm == Algorithm::kTree || algorithm == Algorithm::kHierarchical) {
    const StepsInTurn turn = steps_in_turn(kind, algorithm, elements, ranks, per_node);
    own.steps = static_cast<double>(turn.steps), own.elements = static_cast<double>(turn.elements);
    own.leveled = nodes;
    if (nodes)
      own.steps_across = static_cast<double>(turn.steps_across), own.elements_across = static_cast<double>(turn.elements_across);
    return own;
  }
  own.steps = static_cast<double>(collective_steps(kind, algorithm, ranks, 0, root).size());
  own.elements = static_cast<double>(sent_elements(kind, algorithm, elements, ranks, 0, root));
  if (algorithm != Algorithm::kDirect) return own;
  own.messages = own.steps * (ranks - 2);
  own.leveled = nodes;
  if (nodes) own.steps_across = own.steps, own.elements_across = own.elements * (ranks - per_node) / (ranks - 1);
  return own;
}

}  // namespace shardlab::simulator
