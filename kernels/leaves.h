// How a shard says which part of a logical extent it holds, so that its sums are subtrees of the sum over the whole.
#pragma once

#include <cstdint>

#include "plan/base/tree.h"

namespace shardlab::kernels {

// Inlined always: see kernels/cpu/vector.h on what may be left in a variant's objects.
#define SHARDLAB_LEAVES inline __attribute__((always_inline)) constexpr

/// The part [begin, begin + extent) of a logical extent of `total` elements that is cut in 16 leaves (docs/canonical-order.md).
/// `total` 0 means that the part is the whole. A part n*j/t .. n*(j+1)/t with t a divisor of 16 holds whole leaves, an aligned
/// block of 16/t of them; any other part clips its first and last leaf (a valid sum, no longer a subtree of the whole's).
struct Part {
  int64_t begin = 0;
  int64_t total = 0;
};

/// The leaves of a `Part` of `extent` elements, as offsets into the part.
class PartLeaves {
 public:
  SHARDLAB_LEAVES PartLeaves(Part part, int64_t extent) : part_(part), extent_(extent) {
    if (part_.total == 0) part_ = {0, extent};
    if (part_.total == 0) return;
    first_ = static_cast<int>(part_.begin * kContractionLeaves / part_.total);
    const int64_t end = (part_.begin + extent) * kContractionLeaves;
    count_ = static_cast<int>((end + part_.total - 1) / part_.total) - first_;
  }
  SHARDLAB_LEAVES int count() const { return count_; }
  /// Offset of leaf i's first element, i in [0, count()]; leaf i is [begin(i), begin(i + 1)) and may be empty.
  SHARDLAB_LEAVES int64_t begin(int i) const {
    const int64_t at = leaf_begin(part_.total, first_ + i) - part_.begin;
    return at < 0 ? 0 : at > extent_ ? extent_ : at;
  }

 private:
  Part part_;
  int64_t extent_ = 0;
  int first_ = 0;
  int count_ = 0;
};

/// The token rows of an activation [sequences, tokens, width]. `part` says which tokens of a sequence they are, where a
/// sequence is cut.
struct Tokens {
  int64_t sequences = 1;
  int64_t tokens = 0;
  Part part;
  SHARDLAB_LEAVES int64_t rows() const { return sequences * tokens; }
};

/// Columns of a part of a vocabulary that are words, of `words` in all (0: every column). They come first: those after them are padding.
SHARDLAB_LEAVES int64_t words_held(Part part, int64_t columns, int64_t words) {
  const int64_t held = words == 0 ? columns : words - part.begin;
  return held < 0 ? 0 : held > columns ? columns : held;
}

#undef SHARDLAB_LEAVES

}  // namespace shardlab::kernels
