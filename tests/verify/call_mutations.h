// Mutations of a role's program: one call dropped, doubled, or exchanged with another. Which of them does `verify` accept, and why?
#pragma once

#include <cstdint>
#include <string>
#include <unordered_set>
#include <vector>

#include "plan/plan.h"
#include "tests/namespaces.h"

namespace shardlab::testing {

/// What became of the mutants of one kind.
struct CallTally {
  int mutants = 0;
  int refused = 0;
  int equivalent = 0;  ///< accepted, and `effect_of` says that the program does what it did
  void add(const CallTally& other) {
    mutants += other.mutants;
    refused += other.refused;
    equivalent += other.equivalent;
  }
};

struct CallScore {
  CallTally dropped, doubled, exchanged;
  /// "zero-1 | stage 0 | drop update.3 (item 17, layer -1, micro-batch -1)": accepted, and not seen to be equivalent.
  std::vector<std::string> survivors;
};

/// What a program does, as one number: what every buffer that outlives the period holds at its end, and what is sent to other
/// roles, in which order. Each op's results are a hash of its text and of what it reads, so that two programs of one effect compute
/// the same values from the same values. A gather or broadcast in place of what an equal one left there changes nothing.
uint64_t effect_of(const Plan& plan, int role);

/// Which two calls are exchanged.
struct CallDeal {
  uint64_t one_of = 1;                            ///< of those more than four calls apart one of so many, by a hash of their place
  const std::unordered_set<std::string>& always;  ///< and those that are named so in `CallScore::survivors`
};

/// Drops and doubles every call of every role, and exchanges those two by two that the deal names.
CallScore mutate_calls(const Plan& plan, const CallDeal& deal);

}  // namespace shardlab::testing
