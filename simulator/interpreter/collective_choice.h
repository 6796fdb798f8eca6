// `collective_algorithm: auto` on a described machine: the algorithm of each collective is the one that is predicted to take least. A plan
// knows no seconds, so that the choice is made here and written into the plan, whose text names it.
#pragma once

#include <vector>

#include "plan/base/result.h"
#include "plan/case.h"
#include "plan/plan.h"
#include "plan/priced_collective.h"
#include "simulator/interpreter/cost_model.h"

namespace shardlab::simulator {

/// Gives each collective of the plan that the case leaves open the algorithm whose `communicate_among` is least, of those that the group
/// can have: halving-doubling in powers of two above two, two levels where the group lies evenly over nodes with several of its ranks on
/// each. Of equals the one that stands counts, which is the rule's (plan/automatic.h). Left as they are: plans of this machine, whose bits
/// would hang on a measurement; canonical plans; exchanges of all with all; and what a strategy needs direct. Returns whether any
/// algorithm changed: the plan must be verified again.
bool choose_collectives(const Case& config, Plan& plan, const PlacedCostModel& costs);

/// A plan just lowered from `config`, with its collectives chosen by the machine's costs; verified again where `verified` and one changed.
/// A machine that cannot be priced keeps the rule's.
Result<Plan> with_chosen_collectives(const Case& config, Result<Plan> plan, bool verified);

/// The collectives among several ranks that a step of `plan` runs, equal ones once: those that take longest in a step first, and where
/// nothing is priced the largest. Prices are `communicate_among` of the first group, as `choose_collectives` compares them; a machine that
/// cannot be priced gives none.
std::vector<PricedCollective> priced_collectives(const Case& config, const Plan& plan);

}  // namespace shardlab::simulator
