// Gradient accumulation over the micro-batches of a step.
#pragma once

#include <span>
#include <utility>
#include <vector>

#include "strategies/draft.h"

namespace shardlab::strategies {

void accumulate(Draft& draft);

/// Whether each micro-batch's gradients are summed over the parts of its sequences before micro-batches are added up: in canonical
/// mode the tree over sequences stands above the leaves of each. ZeRO-2 and 3 reduce each micro-batch anyhow.
bool sums_parts_early(const Draft& draft);

/// The axes over which the gradients of a step are reduced at its end.
AxisSet reduction_axes(const Draft& draft);

/// The fate of one micro-batch's gradients. They are written to copy `written`. Then `added` lists, in order, which copy is added
/// to which (to, from); the copy `from` is free afterwards. At the end of the step copy 0 has the sum.
struct Carry {
  int written = 0;
  std::vector<std::pair<int, int>> added;
};

/// Sums that are kept apart until they are added: one after another (two copies at most), or in canonical mode as micro-batches are
/// the leaves of a binary tree (docs/canonical-order.md), two subtrees as soon as both are there. In order that is a binary
/// counter, of floor(log2 m) + 1 copies at most. `order` has the micro-batches, of the `micro_batches` of a step, in the order in
/// which their gradients are made.
std::vector<Carry> carries(std::span<const int> order, int micro_batches, bool canonical);

}  // namespace shardlab::strategies
