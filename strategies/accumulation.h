// Gradient accumulation over the micro-batches of a step.
#pragma once

#include <span>
#include <utility>
#include <vector>

namespace shardlab::strategies {

struct Draft;

void accumulate(Draft& draft);

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
