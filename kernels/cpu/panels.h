// Sizes of packed panels: shared by the kernels and by the functions that state their scratch, hence the same for all variants.
#pragma once

#include <cstdint>

namespace shardlab::kernels {

#define SHARDLAB_SIZE inline __attribute__((always_inline)) constexpr

SHARDLAB_SIZE int64_t padded_to_lanes(int64_t n) { return (n + 15) / 16 * 16; }

/// Rows of a tile of the canonical product, at most.
inline constexpr int64_t kMostTileRows = 8;

/// Columns that the canonical product packs at a time: what fits in 2^18 floats, but at least 64 and at most 512.
SHARDLAB_SIZE int64_t block_columns(int64_t extent) {
  const int64_t fits = (int64_t{1} << 18) / (extent > 0 ? extent : 1) / 64 * 64;
  return fits < 64 ? 64 : fits > 512 ? 512 : fits;
}

/// Query rows that attention works on at a time.
inline constexpr int kQueryRows = 4;

/// Partial sums of dk and dv that backward holds at once: one, or in canonical mode those of a tree over 16 leaves and the query heads
/// of a group.
SHARDLAB_SIZE int key_gradient_entries(bool canonical, int heads_of_group) {
  int entries = canonical ? 6 : 1;
  for (int n = heads_of_group - 1; canonical && n > 0; n /= 2) ++entries;
  return entries;
}

#undef SHARDLAB_SIZE

}  // namespace shardlab::kernels
