// Gradient accumulation over the micro-batches of a step.
#pragma once

#include <span>
#include <utility>
#include <vector>

#include "strategies/draft.h"

namespace shardlab::strategies {

void accumulate(Draft& draft);

/// The axes over which each micro-batch's gradients are summed before micro-batches are added up: in canonical mode, where the tree over
/// micro-batches stands above a sum over these ranks (parts of sequences, parts of a micro-batch that share experts). Else none.
AxisSet early_axes(const Draft& draft);

/// Those of `among` along which a type is a summand.
AxisSet partial_axes(const Type& type, AxisSet among);

/// The communicator of gradients over these data axes: those of experts that ranks share go by another.
CommId gradients_comm(Draft& draft, AxisSet axes);

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
