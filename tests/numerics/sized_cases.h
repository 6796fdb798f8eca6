// Cases of a subject by the sizes of their layouts, trained and held against the reference.
#pragma once

#include <vector>

#include "tests/numerics/against_reference.h"

namespace shardlab::testing {

/// Degrees of a layout, and micro-batches.
struct Sizes {
  int dp = 1, ep = 1, pp = 1, zero = 0, accumulation = 1;
  Schedule schedule = Schedule::k1F1B;
  int cp = 1;
  ContextKind kind = ContextKind::kRing;
  int tp = 1;
  bool sequence_parallel = false;
  int expert_tp = 0;
};

/// The sizes with experts cut by fewer ranks than tp has, in groups that share them; by one: whole.
inline Sizes with_expert_slices(Sizes sizes, int ranks) {
  sizes.sequence_parallel = true, sizes.expert_tp = ranks;
  return sizes;
}
inline Sizes with_whole_experts(Sizes sizes) { return with_expert_slices(sizes, 1); }

/// The subject under that layout, its sequences dealt to data ranks and micro-batches.
Case case_of(const Subject& subject, const Sizes& sizes, bool canonical);

/// `kSteps` steps of the case.
Result<Trained> train(const Case& config);

/// Trains the cases and compares each with the reference, whose sequences lie in memory in the case's order. Unless thorough, of more than eight cases
/// about one in six is trained, and of more than four one in three, dealt by their number and the subject.
void train_all(const Subject& subject, const std::vector<Case>& cases);

}  // namespace shardlab::testing
