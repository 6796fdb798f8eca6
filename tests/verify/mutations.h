// Mutations: a good plan broken in one place, in every place where it can be. What share of them does `verify` find?
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "plan/plan.h"
#include "tests/namespaces.h"

namespace shardlab::testing {

/// A count per kind of mutation.
struct MutationTally {
  std::string kind;
  int mutants = 0;
  int equivalent = 0;  ///< left out: the mutant does what the plan did
  int killed = 0;
  std::vector<std::string> survivors;  ///< plan and place of those not found
};

/// Breaks every plan in every way and tallies. Equivalent mutants are left out by the rules in `kEquivalenceRules`. Of the others one in
/// `share` is judged, dealt by its number.
std::vector<MutationTally> mutate_all(const std::vector<Plan>& plans, uint64_t share = 1);

/// "dropped collective   12 of 12   ..." one line per kind, then the total and the rules.
std::string score_table(const std::vector<MutationTally>& tallies);

/// Killed over mutants, both without the equivalent ones; in whole percent, rounded down.
int score_percent(const std::vector<MutationTally>& tallies);

}  // namespace shardlab::testing
